"""What each step did: a bounded log in packed columns, with no object a step.

Steps are kept in blocks of BLOCK_STEPS, the oldest of which goes as a whole. Events come between two answered
steps and belong to the second one.
"""

from __future__ import annotations

import enum
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_service.core.events import Failure
from scheduler_service.core.sequence import LiveRequest
from scheduler_service.core.waiting.reasons import WaitReason

MEMORY_S = 3600.0
"""Seconds for which a step is kept, unless the log is full."""
MAX_BYTES = 64 << 20
"""Size of the log, at most."""
BLOCK_STEPS = 256
NOTED_WAIT_S = 1e-3
"""A part of a request's wait before it was queued is noted if it took as long."""
MAX_EVENTS = 4096
"""Events of one step; further ones are left out."""

_STEP_BYTES, _EVENT_BYTES, _NAME_BYTES = 64, 17, 500  # of a step; of an event; of a name, at most

FAILURES = tuple(Failure)
"""By the value of an event REFUSED."""


class StepEvent(enum.IntEnum):
    """What happened to a request, with the numbers of scheduler.proto's StepEventKind."""

    ADMITTED = 1
    PREEMPTED = 2
    RESUMED = 3
    REFUSED = 4
    ENDED = 5
    QUEUED = 6
    CALLERS_TURN = 7
    TOKENIZING = 8
    GRAMMAR_COMPILING = 9


@dataclass(slots=True)
class StepFigures:
    """Figures of one sent step. Those of the answer are added when it comes."""

    sent_at: float
    planned_s: float  # predicted
    free_pages: int  # when it was planned, evictable ones included
    reason: WaitReason  # why no further sequence was admitted
    prompt_rows: int = 0
    decode_rows: int = 0
    verify_rows: int = 0
    tokens: int = 0  # fed
    drafted: int = 0


COLUMNS = (
    *("started_us", "planned_us", "taken_us", "prompt_rows", "decode_rows", "verify_rows", "tokens"),
    *("drafted_tokens", "accepted_tokens", "free_pages", "running", "waiting", "reasons", "event_counts"),
)
"""Figures of a step, as StepLog's fields of these names, but started_us from its block's first step on."""
_FIGURES = len(COLUMNS) - 1
"""All but started_us."""


@dataclass(slots=True)
class Events:
    """Parallel columns, one entry an event, in the order in which they came."""

    kinds: array[int] = field(default_factory=lambda: array("B"))
    requests: array[int] = field(default_factory=lambda: array("Q"))
    indexes: array[int] = field(default_factory=lambda: array("I"))
    values: array[int] = field(default_factory=lambda: array("I"))

    def add(self, kind: StepEvent, request: int, index: int, value: int) -> None:
        """Add one."""
        self.kinds.append(kind)
        self.requests.append(request)
        self.indexes.append(index)
        self.values.append(value)

    def part(self, begin: int, end: int) -> Events:
        """Those from `begin` on, before `end`."""
        kinds, requests = self.kinds[begin:end], self.requests[begin:end]
        return Events(kinds, requests, self.indexes[begin:end], self.values[begin:end])


Name = tuple[str, str]
"""A request's id, and its identity."""


@dataclass(slots=True)
class _Block:
    """Steps, and the events before each; of the last one also those since."""

    first_step: int
    began_at: float = 0.0  # when its first step began
    # In microseconds since then. Wider than the others: a pause may be longer than 71 minutes.
    started: array[int] = field(default_factory=lambda: array("Q"))
    figures: array[int] = field(default_factory=lambda: array("I"))  # the other COLUMNS, step by step
    events: Events = field(default_factory=Events)
    counted: int = 0  # of these, those of its steps
    names: dict[int, Name] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.started)

    @property
    def ended_at(self) -> float:
        """When its last step began."""
        return self.began_at + self.started[-1] / 1e6

    @property
    def size(self) -> int:
        """Bytes, about, never less than it has."""
        return _STEP_BYTES * len(self) + _EVENT_BYTES * len(self.events.kinds) + _NAME_BYTES * len(self.names)

    def columns(self, begin: int, end: int) -> tuple[array[int], ...]:
        """Of the steps from `begin` on, before `end`; see COLUMNS."""
        figures = self.figures[begin * _FIGURES : end * _FIGURES]
        return self.started[begin:end], *(figures[at::_FIGURES] for at in range(_FIGURES))


@dataclass(frozen=True, slots=True)
class StepPart:
    """Consecutive steps of the log."""

    first_step: int
    started_at: float  # of the first one, on the caller's clock
    columns: tuple[Sequence[int], ...]  # see COLUMNS
    events: Events
    names: dict[int, Name]  # of the requests with events here, by number

    def __len__(self) -> int:
        return len(self.columns[0])


class StepLog:
    """The steps of the last hour, or as many of them as MAX_BYTES hold."""

    def __init__(self) -> None:
        self._blocks = deque([_Block(1)])  # the last one takes further steps
        self._closed_bytes = 0  # of all blocks but the last
        self._steps = 0  # since the start

    @property
    def first(self) -> int:
        """Number of the oldest step that is kept; `end` if none is."""
        return self._blocks[0].first_step

    @property
    def end(self) -> int:
        """Number of the next step; the first one has 1."""
        return self._steps + 1

    @property
    def size(self) -> int:
        """Bytes, about."""
        return self._closed_bytes + self._blocks[-1].size

    def __len__(self) -> int:
        return self.end - self.first

    def note(self, kind: StepEvent, live: LiveRequest, index: int, value: int) -> None:
        """Something happened to a request."""
        block = self._blocks[-1]
        if len(block.events.kinds) - block.counted < MAX_EVENTS:
            block.events.add(kind, live.serial, index, value)
            block.names[live.serial] = live.request.id, live.request.identity

    def queued(self, live: LiveRequest) -> None:
        """A request was queued, after what it had waited for before."""
        for reason, seconds in live.waits_before:
            if seconds >= NOTED_WAIT_S:
                self.note(StepEvent[reason.name], live, 0, _us(seconds))
        self.note(StepEvent.QUEUED, live, 0, live.request.input_tokens)

    def answered(
        self, step: StepFigures, began_at: float, taken_s: float, accepted: int, running: int, waiting: int
    ) -> None:
        """A step was answered. running, waiting: sequences, afterwards.

        began_at: when it was sent, or the step before was answered, if that was later: steps do not overlap.
        """
        block = self._blocks[-1]
        if not block.started:
            block.began_at = began_at
            self._forget(began_at)
        events = len(block.events.kinds)
        block.started.append(_long_us(began_at - block.began_at))
        block.figures.extend(
            (
                _us(step.planned_s),
                _us(taken_s),
                step.prompt_rows,
                step.decode_rows,
                step.verify_rows,
                step.tokens,
                step.drafted,
                accepted,
                step.free_pages,
                running,
                waiting,
                step.reason,
                events - block.counted,
            )
        )
        block.counted = events
        self._steps += 1
        if len(block.started) == BLOCK_STEPS:
            self._closed_bytes += block.size
            self._blocks.append(_Block(self.end))

    def _forget(self, now: float) -> None:
        """Drop closed blocks that are too old, or too much."""
        blocks = self._blocks
        while len(blocks) > 1 and (self._closed_bytes > MAX_BYTES or now - blocks[0].ended_at > MEMORY_S):
            self._closed_bytes -= blocks.popleft().size

    def since(self, at: float) -> int:
        """Number of the first kept step that began at `at` or later; `end` if there is none."""
        for block in self._blocks:
            if block.started and block.ended_at >= at:
                return block.first_step + bisect_left(block.started, _long_us(at - block.began_at))
        return self.end

    def read(self, first: int, most: int) -> StepPart | None:
        """Up to `most` kept steps from `first` on, from one block; None if there is none yet.

        Those that are kept no more are left out: the part's `first_step` says so. It has about MAX_EVENTS
        events at most, but for those of its first step.
        """
        first = max(first, self.first)
        if first >= self.end or most < 1:
            return None
        block = self._blocks[-1]
        if first < block.first_step:
            block = self._blocks[(first - self.first) // BLOCK_STEPS]
        begin = first - block.first_step
        counts = block.figures[_FIGURES - 1 :: _FIGURES]
        event_begin = event_end = sum(counts[:begin])
        end = begin
        while end < min(len(block), begin + most):
            if end > begin and event_end + counts[end] - event_begin > MAX_EVENTS:
                break
            event_end += counts[end]
            end += 1
        events = block.events.part(event_begin, event_end)
        return StepPart(
            first,
            block.began_at + block.started[begin] / 1e6,
            block.columns(begin, end),
            events,
            {number: block.names[number] for number in events.requests},
        )


def _long_us(seconds: float) -> int:
    return max(0, round(1e6 * seconds))


def _us(seconds: float) -> int:
    """Of at most 71 minutes."""
    return min(_long_us(seconds), 0xFFFFFFFF)
