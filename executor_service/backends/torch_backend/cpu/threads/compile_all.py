"""Compiles all CPU kernels into numba's cache. A service compiles those that its model needs."""

from executor_service.backends.torch_backend.cpu.threads.dispatch import KERNELS, require
from executor_service.backends.torch_backend.cpu.threads.thread_pool import ThreadPool

if __name__ == "__main__":
    ThreadPool(1).close()
    for kernel in KERNELS:
        require(kernel)
