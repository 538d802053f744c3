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

    def extend(self, later: Events) -> None:
        """Add later ones."""
        self.kinds += later.kinds
        self.requests += later.requests
        self.indexes += later.indexes
        self.values += later.values


Name = tuple[str, str]
"""A request's id, and its identity."""


def _columns() -> tuple[array[int], ...]:
    """Of nothing. started_us is wider than the others: a pause may be longer than 71 minutes."""
    return tuple(array("Q" if name == "started_us" else "I") for name in COLUMNS)


@dataclass(slots=True)
class _Block:
    first_step: int
    began_at: float
    columns: tuple[array[int], ...] = field(default_factory=_columns)
    events: Events = field(default_factory=Events)
    names: dict[int, Name] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns[0])

    @property
    def size(self) -> int:
        """Bytes, about, never less than it has."""
        return _STEP_BYTES * len(self) + _EVENT_BYTES * len(self.events.kinds) + _NAME_BYTES * len(self.names)


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
        self._blocks: deque[_Block] = deque()
        self._closed_bytes = 0  # of all blocks but the last
        self._steps = 0  # since the start
        self._events = Events()  # since the last answered step
        self._names: dict[int, Name] = {}  # theirs

    @property
    def first(self) -> int:
        """Number of the oldest step that is kept; `end` if none is."""
        return self._blocks[0].first_step if self._blocks else self.end

    @property
    def end(self) -> int:
        """Number of the next step; the first one has 1."""
        return self._steps + 1

    @property
    def size(self) -> int:
        """Bytes, about."""
        return self._closed_bytes + (self._blocks[-1].size if self._blocks else 0)

    def __len__(self) -> int:
        return self.end - self.first

    def note(self, kind: StepEvent, live: LiveRequest, index: int, value: int) -> None:
        """Something happened to a request."""
        if len(self._events.kinds) < MAX_EVENTS:
            self._events.add(kind, live.serial, index, value)
            self._names[live.serial] = live.request.id, live.request.identity

    def queued(self, live: LiveRequest) -> None:
        """A request was queued, after what it had waited for before."""
        for reason, seconds in live.waits_before:
            if seconds >= NOTED_WAIT_S:
                self.note(StepEvent[reason.name], live, 0, _us(seconds))
        self.note(StepEvent.QUEUED, live, 0, live.request.input_tokens)

    def answered(self, step: StepFigures, taken_s: float, accepted: int, running: int, waiting: int) -> None:
        """A step was answered. running, waiting: sequences, afterwards."""
        blocks = self._blocks
        if not blocks or len(blocks[-1]) == BLOCK_STEPS:
            self._close(step.sent_at)
        block, events = blocks[-1], self._events
        figures = (
            _long_us(step.sent_at - block.began_at),
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
            len(events.kinds),
        )
        for column, figure in zip(block.columns, figures, strict=True):
            column.append(figure)
        self._steps += 1
        if events.kinds:
            block.events.extend(events)
            block.names |= self._names
            self._events, self._names = Events(), {}

    def _close(self, now: float) -> None:
        """Begin a block, and drop those that are too old or too much."""
        blocks = self._blocks
        if blocks:
            self._closed_bytes += blocks[-1].size
        while blocks and (self._closed_bytes > MAX_BYTES or now - self._ended_at(blocks[0]) > MEMORY_S):
            self._closed_bytes -= blocks.popleft().size
        blocks.append(_Block(self.end, now))

    @staticmethod
    def _ended_at(block: _Block) -> float:
        return block.began_at + block.columns[0][-1] / 1e6

    def since(self, at: float) -> int:
        """Number of the first kept step that was sent at `at` or later; `end` if there is none."""
        for block in self._blocks:
            if self._ended_at(block) >= at:
                return block.first_step + bisect_left(block.columns[0], _long_us(at - block.began_at))
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
        counts = block.columns[-1]
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
            block.began_at + block.columns[0][begin] / 1e6,
            tuple(column[begin:end] for column in block.columns),
            events,
            {number: block.names[number] for number in events.requests},
        )


def _long_us(seconds: float) -> int:
    return max(0, round(1e6 * seconds))


def _us(seconds: float) -> int:
    """Of at most 71 minutes."""
    return min(_long_us(seconds), 0xFFFFFFFF)
