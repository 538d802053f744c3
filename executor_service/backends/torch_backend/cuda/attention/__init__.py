"""Paged attention, and what writes its keys and values."""
