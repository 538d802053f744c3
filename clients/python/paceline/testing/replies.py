"""What a FakeScheduler answers: texts, delays and faults. Frozen dataclasses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import grpc
from service_kit.known import similar

from paceline.chat import ToolCall
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.types import FinishReason

_WAIT_S = 1.0  # retry time where waiting helps and none is given, as schedulers tell it

CODES: Mapping[str, grpc.StatusCode] = MappingProxyType(
    {
        "INVALID_REQUEST": grpc.StatusCode.INVALID_ARGUMENT,
        "UNSUPPORTED": grpc.StatusCode.UNIMPLEMENTED,
        "MODEL_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
        "TOKENIZER_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
        "DUPLICATE_REQUEST": grpc.StatusCode.ALREADY_EXISTS,
        "CONTINUATION": grpc.StatusCode.FAILED_PRECONDITION,
        "QUEUE_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUOTA": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "TOO_LATE": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "NOT_READY": grpc.StatusCode.UNAVAILABLE,
        "DRAINING": grpc.StatusCode.UNAVAILABLE,
        "SHUTTING_DOWN": grpc.StatusCode.UNAVAILABLE,
        "ABORTED": grpc.StatusCode.ABORTED,
        "REPLACED": grpc.StatusCode.ABORTED,
        "STALLED_READER": grpc.StatusCode.ABORTED,
        "DEADLINE_EXCEEDED": grpc.StatusCode.DEADLINE_EXCEEDED,
        "ADAPTER_NAME": grpc.StatusCode.ALREADY_EXISTS,
        "ADAPTER_MEMORY": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "ADAPTERS_DIFFER": grpc.StatusCode.FAILED_PRECONDITION,
        "ADDRESS_TAKEN": grpc.StatusCode.ALREADY_EXISTS,
        "OLD_GENERATION": grpc.StatusCode.FAILED_PRECONDITION,
        "DIRECTORY_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "WATCHERS": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
        "PERMISSION": grpc.StatusCode.PERMISSION_DENIED,
        "EXECUTOR_REFUSED": grpc.StatusCode.INTERNAL,
        "EXECUTORS_LOST": grpc.StatusCode.INTERNAL,
        "NOT_FINITE": grpc.StatusCode.INTERNAL,
        "INTERNAL": grpc.StatusCode.INTERNAL,
    }
)
"""The status code of each ErrorReason of scheduler.proto, by its name without the prefix."""

_RETRYABLE = frozenset({"QUEUE_FULL", "QUOTA", "TOO_LATE", "NOT_READY", "DRAINING"})
_WORD = re.compile(r"\s*\S+|\s+")


@dataclass(frozen=True, slots=True)
class FakeError:
    """The call ends with an error, as a scheduler reports it.

    `reason` is an ErrorReason of scheduler.proto without its prefix ("QUEUE_FULL"), and selects the status
    code. `after` is the number of deltas that are sent before. `retry_after_s`, in seconds: by default 1 for
    reasons where waiting helps, if nothing was sent; else there is none. `field` names the request's field at
    fault. Raises ValueError for an unknown reason or a negative number.
    """

    reason: str
    message: str = ""
    retry_after_s: float | None = None
    field: str = ""
    after: int = 0

    def __post_init__(self) -> None:
        if self.reason not in CODES:
            hint = similar(self.reason, CODES) or f"; there are {', '.join(CODES)}"
            raise ValueError(f"there is no reason {self.reason!r}{hint}")
        if self.retry_after_s is not None and self.retry_after_s < 0:
            raise ValueError(f"retry_after_s {self.retry_after_s:g} is negative")
        _check_after(self.after)

    @property
    def code(self) -> grpc.StatusCode:
        """The status code."""
        return CODES[self.reason]

    @property
    def retry_s(self) -> float | None:
        """The retry time that the client gets, in seconds; None: none."""
        if self.retry_after_s is None and self.reason in _RETRYABLE and not self.after:
            return _WAIT_S
        return self.retry_after_s


@dataclass(frozen=True, slots=True)
class FakeLoss:
    """The call ends as one whose connection breaks: UNAVAILABLE without a reason, as gRPC reports it.

    The client may send the request again, or continue its stream: the first `times` attempts of a request
    are lost after `after` deltas, the next one is answered to its end.
    """

    after: int = 1
    times: int = 1

    def __post_init__(self) -> None:
        _check_after(self.after)
        if self.times < 1:
            raise ValueError(f"times {self.times} is less than 1")


@dataclass(frozen=True, slots=True)
class FakeStall:
    """Nothing more is sent after `after` deltas, until the client leaves or its deadline passes."""

    after: int = 0

    def __post_init__(self) -> None:
        _check_after(self.after)


Fault = FakeError | FakeLoss | FakeStall


@dataclass(frozen=True, slots=True)
class FakeReply:
    """One answer. Each of a request's `n` completions has it.

    A `text` that is one string is sent word by word; a sequence has the text of each delta. What the model
    writes before its answer (`reasoning`) and the calls that it asks for (`tool_calls`) are one delta each,
    before and after the text. `first_delay_s` seconds pass before the first message, and `delay_s` before
    each further delta. With a `fault` the call does not end well.

    The reply is sent as it is: `max_tokens`, stop strings, schemas and sampling parameters do not change it.
    Its tokens are the bytes of its UTF-8. Raises ValueError for a fault after the last delta.
    """

    text: str | Sequence[str] = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    finish: FinishReason = FinishReason.STOP
    first_delay_s: float = 0.0
    delay_s: float = 0.0
    fault: Fault | None = None

    def __post_init__(self) -> None:
        if self.first_delay_s < 0 or self.delay_s < 0:
            raise ValueError("a delay is negative")
        deltas = len(self.deltas)
        if self.fault is not None and self.fault.after > deltas:
            raise ValueError(f"the fault comes after {self.fault.after} deltas, but there are {deltas}")

    @property
    def deltas(self) -> list[pb.Delta]:
        """The deltas of one completion; token ids are the bytes of what each brings."""
        pieces = _WORD.findall(self.text) if isinstance(self.text, str) else self.text
        deltas = [pb.Delta(reasoning=self.reasoning)] if self.reasoning else []
        deltas += [pb.Delta(text=piece) for piece in pieces]
        for index, call in enumerate(self.tool_calls):
            piece = pb.ToolCallDelta(index=index, id=call.id, name=call.name, arguments=call.arguments)
            deltas.append(pb.Delta(tool_calls=[piece]))
        for delta in deltas:
            called = "".join(f"{call.name}{call.arguments}" for call in delta.tool_calls)
            delta.token_ids.extend(f"{delta.reasoning}{delta.text}{called}".encode())
        return deltas


def reply_of(given: str | Sequence[str] | FakeReply | Fault) -> FakeReply:
    """A reply: what it is short for, if it is not one."""
    match given:
        case FakeReply():
            return given
        case FakeError() | FakeLoss() | FakeStall():
            return FakeReply(fault=given)
    return FakeReply(given)


def _check_after(after: int) -> None:
    if after < 0:
        raise ValueError(f"after {after} is negative")
