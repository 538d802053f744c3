"""`Pipe`: a StreamUnifiedDecode whose steps a test sends by hand."""

from __future__ import annotations

import queue
from collections.abc import Iterator

from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import Executor


class Pipe:
    """A stream that the test feeds by hand."""

    def __init__(self, executor: Executor) -> None:
        self._steps: queue.Queue[pb.Step | None] = queue.Queue()
        self._replies = executor.stream(self._feed())

    def send(self, step: pb.Step) -> None:
        self._steps.put(step)

    def receive(self) -> pb.StreamUnifiedDecodeResponse:
        return next(self._replies)

    def close(self) -> list[pb.StreamUnifiedDecodeResponse]:
        """Half-close; what was still to come."""
        self._steps.put(None)
        return list(self._replies)

    def _feed(self) -> Iterator[pb.Step]:
        while (step := self._steps.get()) is not None:
            yield step
