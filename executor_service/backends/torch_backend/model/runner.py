"""`Runner`: runs a backend's steps. `HostRunner` is synchronous, `DeviceRunner` asynchronous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from executor_service.backends.base import PendingForward, Progress
from executor_service.backends.forward_rows import ForwardRows

Numbers = NDArray[np.int32]
Tell = Callable[[Callable[[], Numbers]], None]
"""Has the other ranks' runners `repeat` what the function returns, which is called where there are any."""


class Runner(Protocol):
    """Runs the steps of one model over its caches; all calls from one thread."""

    max_pending_forwards: int  # as in `Backend`

    def capture(self, rows: int, tokens: int, progress: Progress) -> None:
        """As `Backend.capture`."""

    def launch(self, rows: ForwardRows) -> PendingForward:
        """As `Backend.launch`."""

    def repeat(self, message: Numbers) -> None:
        """On a rank above 0: its part of what rank 0's runner announced."""

    def copy_page(self, source: int, target: int) -> None:
        """As `Backend.copy_page`."""

    def close(self) -> None:
        """Forget what was captured: a group of ranks can't be left while graphs have its collectives."""


def tell_nobody(pack: Callable[[], Numbers]) -> None:
    """There are no other ranks."""
