"""The torch backend: real models in PyTorch, with Triton kernels on CUDA and compiled kernels on CPU."""

from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig

__all__ = ["TorchBackend", "TorchConfig"]
