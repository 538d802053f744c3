"""Pages of the KV cache, the sequences that hold them, the sessions that own those."""
