"""A model's files: what its directory or GGUF says, and its weights."""
