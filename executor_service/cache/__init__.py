"""Sequences with their KV cache pages, and the sessions that own the sequences."""
