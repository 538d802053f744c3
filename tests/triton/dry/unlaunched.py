"""Triton's own compiler for compute capability 9.0, with a driver that loads and launches nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_KERNELS = "executor_service.backends.torch_backend.cuda."


class _Launcher:
    """What Triton builds for each compiled kernel to launch it."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        pass


class _Driver:
    """As Triton's driver for CUDA, of a device with the limits of an H100. Tensors are in host memory."""

    launcher_cls = _Launcher
    utils = SimpleNamespace(
        load_binary=lambda name, kernel, shared, device: (1, 2, 64, 0, 1024),
        get_device_properties=lambda device: {
            "max_shared_mem": 227 << 10, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65_536,
        },
    )  # fmt: skip

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cuda


def _forget_compiled() -> None:
    """Make kernels compile anew: each keeps what it was compiled to, for all of the process."""
    modules = [module for name, module in sys.modules.items() if name.startswith(_KERNELS)]
    for value in (value for module in modules for value in vars(module).values()):
        if isinstance(value, JITFunction):
            value.device_caches.clear()


@contextmanager
def unlaunched() -> Iterator[Counter[str]]:
    """Inside, launches compile kernels as on a device, and do nothing; yields the compilations by kernel."""
    compiled: Counter[str] = Counter()
    compile_kernel = JITFunction._do_compile

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        compiled[self.fn.__name__] += 1
        return compile_kernel(self, *arguments, **named)

    with (
        mock.patch.object(JITFunction, "_do_compile", counted),
        mock.patch.object(driver, "_active", _Driver()),  # set_active can't go back to none
    ):
        _forget_compiled()
        try:
            yield compiled
        finally:
            _forget_compiled()
