"""`Runner`: runs a backend's steps. `HostRunner` is synchronous, `DeviceRunner` asynchronous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from executor_service.backends.base import ForwardRow, PendingForward, Progress


class Runner(Protocol):
    """Runs the steps of one model over its caches; all calls from one thread."""

    max_pending_forwards: int  # as in `Backend`

    def capture(self, rows: int, tokens: int, progress: Progress) -> None:
        """As `Backend.capture`."""

    def launch(self, rows: Sequence[ForwardRow]) -> PendingForward:
        """As `Backend.launch`."""

    def copy_page(self, source: int, target: int) -> None:
        """As `Backend.copy_page`."""
