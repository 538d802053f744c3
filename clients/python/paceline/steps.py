"""What each step of a scheduler did: the messages of WatchSteps as Python values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.proto import parse_length_prefixed

from paceline.errors import InternalError
from paceline.responses import lower_name
from paceline.scheduler.v1 import scheduler_pb2 as pb

_FIGURES = (
    *("planned_us", "taken_us", "prompt_rows", "decode_rows", "verify_rows", "tokens", "drafted_tokens"),
    *("accepted_tokens", "free_pages", "running", "waiting"),
)


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """What happened to a request between the answer of the step before and its step's own.

    kind: callers_turn, tokenizing, grammar_compiling (what it waited for before it was queued; microseconds),
    queued (value: prompt tokens), admitted and resumed (prompt tokens found in the prefix cache),
    preempted (tokens of the cache that was given up), refused (`google.rpc.Code`; of all completions), ended
    (completion tokens).
    """

    kind: str
    number: int  # of the request, from 1 on by arrival
    completion: int  # its index
    value: int
    request_id: str = ""  # "": another identity's
    identity: str = ""  # for administrators


@dataclass(frozen=True, slots=True)
class Step:
    """One answered step."""

    number: int  # the scheduler's first has 1
    lost: int  # steps before it that this reader was too slow for
    started_us: int  # since 1970
    planned_us: int  # how long it was predicted to take
    taken_us: int
    prompt_rows: int  # rows that compute prompt tokens
    decode_rows: int
    verify_rows: int  # rows with drafts
    tokens: int  # fed
    drafted_tokens: int
    accepted_tokens: int
    free_pages: int  # evictable ones included, when it was planned
    running: int  # sequences, after it
    waiting: int
    reason: str  # why no further sequence was admitted: a WaitReason in lower case; "": none waited
    events: tuple[RequestEvent, ...]

    @property
    def ended_us(self) -> int:
        """When it was answered, microseconds since 1970."""
        return self.started_us + self.taken_us

    @property
    def new_tokens(self) -> int:
        """Tokens that its rows added to outputs, but for the first ones of prompts."""
        return self.decode_rows + self.verify_rows + self.accepted_tokens


def check_columns(log: pb.StepLog) -> None:
    """Raises InternalError if a message's columns do not fit together."""
    columns = [getattr(log, name) for name in (*_FIGURES, "reasons", "event_counts")]
    events = log.event_kinds, log.event_requests, log.event_indexes, log.event_values
    counts = {len(column) for column in columns} - {len(log.started_us)}
    if counts or {len(one) for one in events} != {sum(columns[-1])}:
        raise InternalError("the columns of a step log have different lengths")


def steps_of(log: pb.StepLog) -> Iterator[Step]:
    """The steps of a message. Raises InternalError if its columns do not fit together."""
    check_columns(log)
    columns = [getattr(log, name) for name in (*_FIGURES, "reasons", "event_counts")]
    events = log.event_kinds, log.event_requests, log.event_indexes, log.event_values
    names = {one.number: (one.request_id, one.identity) for one in log.names}
    happened = (
        RequestEvent(lower_name(pb.StepEventKind, "STEP_EVENT_KIND_", kind), number, index, value, *whose)
        for kind, number, index, value in zip(*events, strict=True)
        for whose in (names.get(number, ("", "")),)
    )
    at_us, lost = log.started_at_us, log.lost_steps
    for at, (later_us, *figures, reason, ends) in enumerate(zip(log.started_us, *columns, strict=True)):
        at_us += later_us
        blocked_by = lower_name(pb.WaitReason, "WAIT_REASON_", reason) if reason else ""
        own = tuple(next(happened) for _ in range(ends))
        fields: tuple[Any, ...] = log.first_step + at, lost, at_us, *figures, blocked_by, own
        yield Step(*fields)
        lost = 0


def read_steps(content: bytes) -> Iterator[Step]:
    """The steps of a file that `paceline steps` has written. Raises ValueError if it is none."""
    try:
        for log in read_logs(content):
            yield from steps_of(log)
    except InternalError as error:
        raise ValueError(str(error)) from None


def read_logs(content: bytes) -> Iterator[pb.StepLog]:
    """The messages of such a file. Raises ValueError if it is none."""
    file = BytesIO(content)
    try:
        while (log := parse_length_prefixed(pb.StepLog, file)) is not None:
            yield log
    except (DecodeError, EOFError, OverflowError) as error:
        raise ValueError(str(error)) from None
