"""The torch backend: real models in plain PyTorch, with CPU kernels of its own."""

from executor_service.backends.torch_backend.backend import TorchBackend, TorchConfig

__all__ = ["TorchBackend", "TorchConfig"]
