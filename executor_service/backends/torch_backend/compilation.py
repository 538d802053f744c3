"""How far numba is with the CPU kernels, which it compiles once and then reads from its cache on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from numba.core import event

from executor_service.backends.base import Progress
from executor_service.backends.torch_backend.cpu.primitives.kernel import Kernel

_COMPILE = "numba:compile"


@contextmanager
def compilation_told(kernels: Sequence[Kernel], progress: Progress) -> Iterator[None]:
    """A context manager: `progress` hears how many of these kernels the block has compiled.

    It hears nothing where the block compiles nothing, as with a cache.
    """
    listener = _Listener(kernels, progress)
    with event.install_listener(_COMPILE, listener):
        yield


class _Listener(event.Listener):
    """Hears of every function that numba compiles. A kernel is one of them, with others in it."""

    def __init__(self, kernels: Sequence[Kernel], progress: Progress) -> None:
        self._missing = {kernel.compute_chunk for kernel in kernels}
        self._count, self._progress = len(self._missing), progress

    def on_start(self, event: Any) -> None:
        """A function is begun."""
        self._tell()

    def on_end(self, event: Any) -> None:
        """A function is compiled."""
        self._missing.discard(event.data["dispatcher"])
        self._tell()

    def _tell(self) -> None:
        # The function that joins them comes last, and counts as one more.
        done = (self._count - len(self._missing)) / (self._count + 1)
        self._progress(f"compiling {self._count} kernels, once on this machine for this version", done)
