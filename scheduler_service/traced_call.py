"""What is known of a call whose spans are recorded. Nothing here imports OpenTelemetry: `spans.py` does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from scheduler_service.core.waiting.course import Course

Attribute = str | int | float | Sequence[str]
Metadata = Iterable[tuple[str, str | bytes]]
_CURRENT: ContextVar[TracedCall | None] = ContextVar("traced_call", default=None)


@dataclass(slots=True)
class TracedCall:
    """One call. It is filled in by whoever knows something, and its span gets all of that at its end."""

    span: object  # of `spans.py`
    attributes: dict[str, Attribute] = field(default_factory=dict)
    courses: Sequence[Course] = ()  # of its sequences; empty: it was not queued
    code: str = ""  # name of the gRPC status, if it failed
    reason: str = ""


class CallTracer(Protocol):
    """Records the spans of calls."""

    def begin(self, method: str, metadata: Metadata) -> TracedCall | None:
        """A call came; None: its spans are not recorded. method: package.Service/Method."""

    def end(self, call: TracedCall) -> None:
        """It has ended, however."""


@contextmanager
def traced(tracer: CallTracer | None, method: str, metadata: Metadata) -> Iterator[None]:
    """A context manager around the handling of a call by this task."""
    call = None if tracer is None else tracer.begin(method, metadata)
    if tracer is None or call is None:
        yield
        return
    token = _CURRENT.set(call)
    try:
        yield
    except BaseException:
        if not call.code:  # the task was cancelled
            call_failed("CANCELLED", "CLIENT_LEFT")
        raise
    finally:
        _CURRENT.reset(token)
        tracer.end(call)


def current_call() -> TracedCall | None:
    """The call that this task handles, if its spans are recorded."""
    return _CURRENT.get()


def call_failed(code: str, reason: str) -> None:
    """The current call ends with this status."""
    if (call := _CURRENT.get()) is not None:
        call.code, call.reason = code, reason
