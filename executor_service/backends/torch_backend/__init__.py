"""The torch backend: real models in plain PyTorch, with CPU kernels of its own."""

import os

# OpenMP's workers spin between two parallel regions. By default for milliseconds, which takes the cores from
# the RPC threads and, when cores are contested, from the very thread that is waited for: steps then last
# ten times as long. This many turns bridge the gaps inside a step. libgomp reads it when torch loads it.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

from executor_service.backends.torch_backend.backend import TorchBackend, TorchConfig

__all__ = ["TorchBackend", "TorchConfig"]
