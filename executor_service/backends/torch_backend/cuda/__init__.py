"""A CUDA device: Triton kernels, and steps that run ahead of the host."""
