"""Where one request is, why, and for how long it has waited: read from what the core knows, by its id."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from scheduler_service.core.joint_limits import JointLimits
from scheduler_service.core.sequence import LiveRequest, LiveSequence
from scheduler_service.core.sequence_pool import SequencePool
from scheduler_service.core.target_executor import TargetExecutor
from scheduler_service.core.waiting.course import Stage
from scheduler_service.core.waiting.reasons import OWN, WaitReason, WaitTimes

MEMORY_S = 3600.0
"""Seconds for which an ended request is remembered, unless too many ended since."""
MAX_ENDED = 10_000
"""Ended requests that are remembered at most."""
MAX_LABEL_CHARACTERS = 8 << 20
"""Of the labels of all remembered ones together; one request may have 16 KiB."""
SLOW_S = 1.0
"""A request that has waited for less is not slow, whatever was predicted; one without a prediction that has
waited for longer is."""
SLOW_FACTOR = 2.0
"""A request is slow that has waited for longer than this multiple of its predicted wait."""


class Phase(enum.Enum):
    """Where a request is."""

    ARRIVING = "arriving"  # in the front end: the core knows nothing of it yet
    QUEUED = "queued"
    RUNNING = "running"  # each of its unfinished sequences has a cache
    PREEMPTED = "preempted"  # a sequence of it waits again
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class WaitReport:
    """One request. Its reason and times are those of the first of its sequences that waits.

    It has nothing of other identities but the reason of what is next in turn, and how long steps take.
    """

    request_id: str
    identity: str
    phase: Phase
    since: float  # when it came there, on the caller's clock
    predicted_wait_s: float | None  # at its adding; None: it was not known
    queue_waits: WaitTimes = ()
    preempted_waits: WaitTimes = ()
    reason: WaitReason = WaitReason.NONE  # NONE: it does not wait
    position: int = 0  # in its identity's queue, from 1 on; 0: it is not there
    first_reason: WaitReason = WaitReason.NONE  # of the first in its identity's queue
    needed: int = 0  # of what that one waits for
    available: int = 0  # of the same; 0, 0: it can't be counted
    total: int = 0  # of what it waits for in the end, itself or by those before it: how many there are
    next_reason: WaitReason = WaitReason.NONE  # of what is next in turn, whosever it is
    step_s: float = 0.0  # that the executor computes a step, as a moving average
    step_age_s: float = 0.0  # since the oldest step in flight was sent
    tokens: int = 0  # of an ended one: output tokens of its first completion
    token_s: float = 0.0  # likewise, between two of them; 0: there are no two
    adapter: bytes = b""  # its fingerprint; empty: none
    labels: Mapping[str, str] = field(default_factory=dict)


def _waiting(live: LiveRequest) -> LiveSequence | None:
    return next((one for one in live.sequences if one.wait.standing is not None), None)


def _total(reason: WaitReason, limits: JointLimits | None) -> int:
    """Of what this reason says is lacking: how many there are in all; 0: it says nothing of the kind."""
    match reason:
        case WaitReason.SEATS if limits is not None:
            return limits.max_sequences
        case WaitReason.PAGES | WaitReason.PAGES_IN_FLIGHT if limits is not None:
            return limits.total_pages
        case WaitReason.ADAPTER_SLOT if limits is not None:
            return limits.adapter_slots
        case _:
            return 0


def report(live: LiveRequest, pool: SequencePool, target: TargetExecutor, now: float) -> WaitReport:
    """A live request. Takes no time that depends on the number of waiting ones."""
    waits, waiting = pool.waits, _waiting(live)
    step_s, step_age_s = target.pace(now)
    if waiting is None:
        running = [one.wait.since for one in live.sequences if one.cache_id]
        one = _plain(live, live.sequences[0], Phase.RUNNING, max(running, default=now))
        return replace(one, step_s=step_s, step_age_s=step_age_s)
    waits.settle(waiting)
    has_run = waiting.wait.has_run
    phase, since = (Phase.PREEMPTED, waiting.wait.began) if has_run else (Phase.QUEUED, live.added_at)
    queued = pool.queue.queue_of(live.account)
    position = queued.position(waiting) if waiting in queued else 0
    first = queued[0] if position else waiting
    reason, first_reason = waits.reason_of(waiting), waits.reason_of(first)
    needed, available = (waits.needed, waits.available) if first is waits.head else (0, 0)
    if first_reason is WaitReason.ADAPTER_SLOT:
        needed = 1
    last = first_reason if reason in OWN else reason
    return replace(
        _plain(live, waiting, phase, since),
        reason=reason,
        position=position,
        first_reason=first_reason,
        needed=needed,
        available=available,
        total=_total(waits.reason if last is WaitReason.OTHER_TURN else last, target.limits),
        next_reason=waits.reason,
        step_s=step_s,
        step_age_s=step_age_s,
    )


def _plain(
    live: LiveRequest,
    sequence: LiveSequence,
    phase: Phase,
    since: float,
    tokens: int = 0,
    token_s: float = 0.0,
) -> WaitReport:
    request, wait = live.request, sequence.wait
    return WaitReport(
        request.id,
        request.identity,
        phase,
        since,
        live.predicted_wait_s,
        wait.queued.times(),
        () if wait.again is None else wait.again.times(),
        tokens=tokens,
        token_s=token_s,
        adapter=request.adapter,
        labels=request.labels,
    )


def is_slow(live: LiveRequest, now: float) -> bool:
    """It waits, and has for longer than SLOW_S and SLOW_FACTOR times the wait that was predicted."""
    waiting = _waiting(live)
    if waiting is None:
        return False
    began = waiting.wait.began if waiting.wait.has_run else live.request.arrival
    return now - began > max(SLOW_S, SLOW_FACTOR * (live.predicted_wait_s or 0.0))


class EndedRequests:
    """What the requests that ended last have waited for, for MEMORY_S, at most MAX_ENDED.

    Fewer, if their labels are long.
    """

    def __init__(self) -> None:
        self._reports: OrderedDict[str, WaitReport] = OrderedDict()  # by id, in the order of their ends
        self._label_characters = 0

    def add(self, live: LiveRequest, now: float) -> None:
        """A request has ended. A later one with the same id replaces it."""
        reports, request_id = self._reports, live.request.id
        if request_id in reports:
            self._forget(request_id)
        first = live.sequences[0]
        tokens, decode_s = len(first.tokens) - first.input_length, first.wait.course.spent(Stage.DECODE)
        token_s = decode_s / (tokens - 1) if tokens > 1 else 0.0
        reports[request_id] = _plain(live, first, Phase.ENDED, now, tokens, token_s)
        self._label_characters += _characters(live.request.labels)
        while len(reports) > MAX_ENDED or self._label_characters > MAX_LABEL_CHARACTERS:
            self._forget(next(iter(reports)))

    def get(self, request_id: str, now: float) -> WaitReport | None:
        """The request that ended last with this id."""
        reports = self._reports
        while reports and now - next(iter(reports.values())).since > MEMORY_S:
            self._forget(next(iter(reports)))
        return reports.get(request_id)

    def __iter__(self) -> Iterator[str]:
        """The ids, in the order of their ends."""
        return iter(self._reports)

    def _forget(self, request_id: str) -> None:
        self._label_characters -= _characters(self._reports.pop(request_id).labels)


def _characters(labels: Mapping[str, str]) -> int:
    return sum(len(name) + len(value) for name, value in labels.items())
