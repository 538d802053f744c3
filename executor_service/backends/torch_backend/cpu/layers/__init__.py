"""A model's linear layers and blocks, as calls of kernels."""
