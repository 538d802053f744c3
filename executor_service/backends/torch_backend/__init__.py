"""The torch backend: real models in PyTorch, with Triton kernels on CUDA and compiled kernels on CPU."""
