"""How far numba is with the CPU kernels, which it compiles once and then reads from its cache on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event

from executor_service.backends.base import Progress
from executor_service.backends.torch_backend.cpu.threads.dispatch import COMMON, compiled_function

_COMPILE = "numba:compile"
_USUAL = len(COMMON) + 3  # a layer's product, a gated one, and that of the output layer or rows in int8


@contextmanager
def compilation_told(progress: Progress) -> Iterator[None]:
    """A context manager: `progress` hears how far the compilation of kernels in the block is.

    It hears nothing where the block compiles nothing, as with a cache.
    """
    with event.install_listener(_COMPILE, _Listener(progress)):
        yield


class _Listener(event.Listener):
    """Hears of every function that numba compiles. A kernel is one of them, and calls others."""

    def __init__(self, progress: Progress) -> None:
        self._done, self._progress = 0, progress

    def on_start(self, event: Any) -> None:
        """A function is begun."""
        self._tell()

    def on_end(self, event: Any) -> None:
        """A function is compiled."""
        self._done += event.data["dispatcher"] is compiled_function
        self._tell()

    def _tell(self) -> None:
        fraction = min(self._done / _USUAL, 1.0)
        self._progress("compiling kernels, once on this machine for this version", fraction)
