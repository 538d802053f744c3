"""The live requests: which there are, how many are queued, when each is due; every end of one is here."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.errors import DuplicateRequest, NeverFits, QueueFull
from scheduler_service.core.events import Event, Failed, Failure, Finished, FinishReason
from scheduler_service.core.policy import Limits, retry_after_s
from scheduler_service.core.request import Request
from scheduler_service.core.roster import Roster
from scheduler_service.core.sequence import LiveRequest, Sequence
from scheduler_service.core.snapshot import Counters
from scheduler_service.core.speculation.speculator import Speculator
from scheduler_service.core.states import State


class Registry:
    """All requests that were taken and have not ended, in the order of their adding."""

    def __init__(
        self, config: CoreConfig, roster: Roster, speculator: Speculator, counters: Counters
    ) -> None:
        self._config = config
        self._roster = roster
        self._speculator = speculator
        self._counters = counters
        self._live: dict[str, LiveRequest] = {}
        self._deadlines: list[tuple[float, int, LiveRequest]] = []  # a heap; ended ones go when they surface
        self._serial = 0
        self.queued_requests = 0  # not started yet
        self.queued_tokens = 0  # of their prompts
        self._last_start = 0.0
        self._start_interval_s = 1.0  # moving average

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    def get(self, request_id: str) -> LiveRequest | None:
        """The live request of this id."""
        return self._live.get(request_id)

    def check(self, request: Request, limits: Limits) -> None:
        """Raise what speaks against taking it: DuplicateRequest, NeverFits or QueueFull."""
        if request.id in self._live:
            raise DuplicateRequest(f"request {request.id!r} is live")
        why = misfit(request, limits)
        if why is None and request.input_tokens > self._config.max_queued_tokens:
            why = "prompt", f"has more tokens than the queue holds ({self._config.max_queued_tokens})"
        if why is not None:
            raise NeverFits(*why)
        self.check_room(request.input_tokens)

    def check_room(self, tokens: int = 1) -> None:
        """Raise QueueFull if a prompt of so many tokens can't be queued."""
        if self.queued_requests >= self._config.max_queued_requests:
            what = f"{self.queued_requests} requests are queued"
        elif self.queued_tokens + tokens > self._config.max_queued_tokens:
            what = f"{self.queued_tokens} tokens are queued"
        else:
            return
        raise QueueFull(what, retry_after_s(self.queued_requests, self._start_interval_s))

    def add(self, request: Request, limits: Limits, now: float) -> LiveRequest:
        """Take it; `check` has passed."""
        self._serial += 1
        live = LiveRequest(request, self._serial, max_tokens(request, limits), now)
        self._live[request.id] = live
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, live.serial, live))
        self.queued_requests += 1
        self.queued_tokens += request.input_tokens
        self._speculator.enlist(live)
        self._roster.enlist(live)
        return live

    def take_over(self, live: LiveRequest, now: float) -> list[Event]:
        """End those completions of a new request that had their end elsewhere; the ends to be told."""
        events: list[Event] = []
        for one in live.request.continued:
            if one.finished:
                self._roster.end(live.sequences[one.index])
        for one in live.request.continued:
            sequence = live.sequences[one.index]
            if one.ids and not one.finished and (verdict := sequence.verdict()) is not None:
                events.append(self.finish(sequence, *verdict, now))
        return events

    def start(self, live: LiveRequest, now: float) -> None:
        """It is in a step for the first time: it leaves the queue's bounds."""
        if live.started:
            return
        self._unqueue(live)
        if self._last_start:
            self._start_interval_s += 0.1 * (now - self._last_start - self._start_interval_s)
        self._last_start = now

    def _unqueue(self, live: LiveRequest) -> None:
        live.started = True
        self.queued_requests -= 1
        self.queued_tokens -= live.request.input_tokens

    def finish(self, sequence: Sequence, reason: FinishReason, matched: int | None, now: float) -> Finished:
        """End one completion well."""
        live = sequence.live
        self._roster.end(sequence)
        if live.ended:
            self._counters.finished += 1
            self._forget(live)
        return Finished(live.request.id, sequence.index, reason, matched, sequence.usage(now))

    def fail(self, live: LiveRequest, failure: Failure, message: str) -> Failed:
        """End a whole request badly."""
        for sequence in reversed(live.sequences):
            self._roster.end(sequence)
        if failure is Failure.CANCELLED:
            self._counters.cancelled += 1
        else:
            self._counters.failed += 1
        self._forget(live)
        return Failed(live.request.id, failure, message, live.emitted)

    def _forget(self, live: LiveRequest) -> None:
        del self._live[live.request.id]
        if not live.started:
            self._unqueue(live)
        if len(self._deadlines) > 2 * len(self._live) + 64:  # far deadlines must not keep ended requests
            self._deadlines = [entry for entry in self._deadlines if self._is_live(entry[2])]
            heapify(self._deadlines)

    def _is_live(self, live: LiveRequest) -> bool:
        return self._live.get(live.request.id) is live

    def next_deadline(self) -> float | None:
        """The earliest one of a live request."""
        heap = self._deadlines
        while heap and not self._is_live(heap[0][2]):
            heappop(heap)
        return heap[0][0] if heap else None

    def past_deadline(self, now: float) -> Iterator[LiveRequest]:
        """Those whose deadline has come; each must be ended before the next is asked for."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            yield self._deadlines[0][2]

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        assert all(not live.ended for live in self), "an ended request is live"
        queued = [live for live in self if not live.started]
        assert self.queued_requests == len(queued), "queued requests are miscounted"
        assert self.queued_tokens == sum(q.request.input_tokens for q in queued), (
            "queued tokens are miscounted"
        )
        sequences = [s for live in self for s in live.sequences]
        for live in self:
            held = any(s.state is State.HELD for s in live.sequences)
            assert not (held and live.sequences[0].state is State.ENDED), "siblings are held for nothing"
        self._roster.check_integrity(sequences)


def max_tokens(request: Request, limits: Limits) -> int:
    """Most output tokens of each completion."""
    if request.max_tokens is not None:
        return request.max_tokens
    return limits.request_tokens - len(request.prompt)


def misfit(request: Request, limits: Limits) -> tuple[str, str] | None:
    """The field and what is wrong with it, if one completion could not even run alone."""
    if not request.prompt:
        return "prompt", "is empty"
    if request.n < 1:
        return "n", "must be at least 1"
    if len(request.prompt) >= limits.request_tokens:
        return "prompt", f"has {len(request.prompt)} tokens; at most {limits.request_tokens - 1} fit"
    for one in request.continued:
        if len(one.ids) > (request.max_tokens or limits.request_tokens - len(request.prompt)):
            return "continuation", f"has {len(one.ids)} tokens of completion {one.index}, more than fit"
    if request.max_tokens is not None:
        if request.max_tokens < 1:
            return "max_tokens", "must be at least 1"
        total = len(request.prompt) + request.max_tokens
        if total > limits.request_tokens:
            return "max_tokens", f"makes {total} tokens with the prompt; at most {limits.request_tokens} fit"
    return None
