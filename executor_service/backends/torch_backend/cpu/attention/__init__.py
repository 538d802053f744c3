"""Paged attention: pages of keys and values, rotary embedding, softmax."""
