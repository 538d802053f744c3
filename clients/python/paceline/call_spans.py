"""Where a call meets its CLIENT span. Spans are off, without OpenTelemetry, until `paceline.trace_calls`."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from google.protobuf.message import Message

from paceline.channel import Metadata
from paceline.scheduler.v1 import scheduler_pb2 as pb

_TRACED = (pb.GenerateRequest, pb.GenerateUnaryRequest, pb.ScoreRequest, pb.EmbedRequest, pb.RerankRequest)


class CallSpan:
    """The span of one call, of all its attempts together. This one records nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.end(error)

    def carried(self, metadata: Metadata, address: str) -> Metadata:  # noqa: ARG002
        """The metadata of an attempt at this address, with the span's context."""
        return metadata

    def saw(self, found: Any) -> None:
        """An event of the stream, or the reply, has come."""

    def end(self, error: BaseException | None = None) -> None:
        """The call has ended, or its caller reads no more of it. Only the first end counts."""


NO_SPAN = CallSpan()
Begin = Callable[[Message, Metadata], CallSpan]
_begin: Begin | None = None


def record_calls(begin: Begin | None) -> None:
    """From now on `begin` makes the spans, of a request and its client's metadata; None: there are none."""
    global _begin
    _begin = begin


def call_span(request: object, metadata: Metadata) -> CallSpan:
    """The span of a call that begins now. metadata: the client's."""
    return NO_SPAN if _begin is None or not isinstance(request, _TRACED) else _begin(request, metadata)
