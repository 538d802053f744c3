"""Compiles CPU kernels into numba's cache: all, or with --default-model those of that model.

A service compiles those that its model needs. With --unless-cuda, nothing is compiled where a GPU computes.
"""

import sys

import torch

from executor_service.backends.torch_backend.cpu.gemm.block_products import BYTES, KINDS, NIBBLES_MINIMA
from executor_service.backends.torch_backend.cpu.gemm.low_rank import ShrinkRowsFp32
from executor_service.backends.torch_backend.cpu.gemm.quantize_blocks import QuantizeBlocks
from executor_service.backends.torch_backend.cpu.threads.dispatch import KERNELS, header_of, require
from executor_service.backends.torch_backend.cpu.threads.thread_pool import ThreadPool

DEFAULT_MODEL = (ShrinkRowsFp32, QuantizeBlocks, *KINDS[NIBBLES_MINIMA], KINDS[BYTES].multiply)
"""Of the default model beside those of all models. Its layers are in Q4_1, its head in Q8_0."""

if __name__ == "__main__" and not ("--unless-cuda" in sys.argv and torch.cuda.is_available()):
    ThreadPool(1).close()  # compiles those of all models
    if "--default-model" in sys.argv:
        for kind in DEFAULT_MODEL:
            header_of(kind)
    else:
        for kernel in KERNELS:
            require(kernel)
