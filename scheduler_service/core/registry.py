"""The live requests: added, looked up by id and by deadline, and ended, for whatever reason, only here."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from scheduler_service.core.admission import Admission
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.drafting.speculator import Speculator
from scheduler_service.core.errors import IdInUse, NeverFits
from scheduler_service.core.events import CompletionEnded, EndReason, Event, Failed, Failure
from scheduler_service.core.forecast import Forecast
from scheduler_service.core.joint_limits import JointLimits
from scheduler_service.core.request import Request
from scheduler_service.core.sequence import LiveRequest, LiveSequence
from scheduler_service.core.sequence_pool import ISOLATION_LOSSES, SequencePool
from scheduler_service.core.snapshot import Totals
from scheduler_service.core.states import SequenceState
from scheduler_service.core.step_log import FAILURES, StepEvent
from scheduler_service.core.wait_report import EndedRequests


class Registry:
    """All requests that were taken and have not ended, in the order of their adding."""

    def __init__(
        self,
        config: CoreConfig,
        pool: SequencePool,
        speculator: Speculator,
        admission: Admission,
        forecast: Forecast,
        counters: Totals,
    ) -> None:
        self._config = config
        self._pool = pool
        self._admission = admission
        self._forecast = forecast
        self._speculator = speculator
        self._counters = counters
        self._live: dict[str, LiveRequest] = {}
        self.ended = EndedRequests()
        self._deadlines: list[tuple[float, int, LiveRequest]] = []  # a heap; ended requests are dropped late
        self._serial = 0

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    def get(self, request_id: str) -> LiveRequest | None:
        """The live request of this id."""
        return self._live.get(request_id)

    def check(
        self,
        request: Request,
        limits: JointLimits,
        now: float,
        *,
        connected: bool,
        replaced: LiveRequest | None = None,
    ) -> bool:
        """Whether the request would be a trial (`admission.py`) if it is taken.

        Raises IdInUse, NeverFits, NoRoom, QuotaUsed or TooLate if it can't be taken. replaced: the live
        request of the same id, which ends if this one is taken.
        """
        if self._live.get(request.id) is not replaced:
            raise IdInUse(f"request {request.id!r} is live")
        why = misfit(request, limits)
        if why is None and request.input_tokens > self._config.max_queued_tokens:
            field = "prompt" if request.evaluation is None else "inputs"
            why = field, f"has more tokens than the queue holds ({self._config.max_queued_tokens})"
        if why is not None:
            raise NeverFits(*why)
        if not (replaced and replaced.holds_room_for(request)):
            self._admission.check_room(request.identity, request.weight, request.input_tokens)
        return connected and self._admission.check_deadline(
            request.identity,
            request.weight,
            _tokens_in_turn(request, limits),
            request.deadline,
            request.expected_tokens,
            limits,
            now,
        )

    def add(self, request: Request, limits: JointLimits, now: float, *, is_trial: bool) -> LiveRequest:
        """Take a request that has passed `check`."""
        self._serial += 1
        predicted_wait_s = self._admission.predicted_wait_s(
            request.identity, request.weight, limits.max_sequences
        )
        account = self._pool.queue.enter(request, self._pool.running)
        live = LiveRequest(request, account, self._serial, max_tokens(request, limits), now)
        live.predicted_wait_s = predicted_wait_s
        live.is_trial = is_trial
        self._live[request.id] = live
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, live.serial, live))
        self._admission.queue(live)
        self._pool.log.queued(live)
        self._speculator.enlist(live)
        self._pool.enlist(live)
        return live

    def take_over(self, live: LiveRequest, now: float) -> list[Event]:
        """End the completions of a new request that were complete elsewhere.

        Returns an event for each that was not reported as finished there.
        """
        events: list[Event] = []
        for one in live.request.continued:
            if one.finished:
                self._end(live.sequences[one.index])
        for one in live.request.continued:
            sequence = live.sequences[one.index]
            if one.ids and not one.finished and (verdict := sequence.verdict()) is not None:
                events.append(self.finish(sequence, *verdict, now))
        return events

    def fit(self, limits: JointLimits, now: float) -> list[Event]:
        """Another executor is ready: fail the requests that don't fit it, and end what it cuts short."""
        events: list[Event] = []
        for live in list(self):
            if why := misfit(live.request, limits):
                events.append(self.fail(live, Failure.REFUSED, f"{why[0]} {why[1]}", now))
                continue
            if live.request.evaluation is not None:
                continue
            live.set_max_tokens(max_tokens(live.request, limits))
            for sequence in live.sequences:
                if sequence.state is not SequenceState.ENDED and len(sequence.tokens) >= sequence.end_length:
                    events.append(self.finish(sequence, EndReason.LENGTH, None, now))
        return events

    def lose_executor(self, now: float) -> list[Event]:
        """All caches are gone: queue their sequences again, or run them alone, or fail their requests."""
        in_flight = [sequence for sequence in self._pool.running if sequence.in_flight]
        self._pool.lose_all()
        events: list[Event] = []
        for sequence in in_flight:
            if sequence.state is SequenceState.ENDED:
                continue  # with another completion of its request
            losses = sequence.lose_executor()
            if losses > ISOLATION_LOSSES:
                message = f"{losses} executors were lost while they computed it"
                events.append(self.fail(sequence.live, Failure.POISON, message, now))
            elif losses == ISOLATION_LOSSES:
                self._pool.isolate(sequence)
        return events

    def start(self, live: LiveRequest, now: float) -> None:
        """Count a request as started when its first step is sent: it leaves the queue's bounds.

        An evaluation is started when all of its inputs are.
        """
        if live.started or live.to_start > 0:
            return
        live.started = True
        self._admission.unqueue(live, now)
        self._counters.predicted_wait_s += live.predicted_wait_s or 0.0
        self._counters.wait_s += now - live.added_at

    def finish(
        self, sequence: LiveSequence, reason: EndReason, matched: int | None, now: float
    ) -> CompletionEnded:
        """Finish one completion or input."""
        live = sequence.live
        self._pool.log.note(StepEvent.ENDED, live, sequence.index, sequence.generated)
        self._end(sequence)
        self._forecast.ended(sequence, cut_off=False)
        if live.ended:
            self._counters.finished += 1
            self._forget(live, now)
        return CompletionEnded(live.request.id, sequence.index, reason, matched, sequence.usage(now))

    def fail(self, live: LiveRequest, failure: Failure, message: str, now: float) -> Failed:
        """Fail a whole request: all its completions that have not ended."""
        self._pool.log.note(StepEvent.REFUSED, live, 0, FAILURES.index(failure))
        for sequence in reversed(live.sequences):
            if sequence.state is not SequenceState.ENDED:
                self._end(sequence)
                self._forecast.ended(sequence, cut_off=failure is Failure.DEADLINE)
        if failure is Failure.CANCELLED:
            self._counters.cancelled += 1
        else:
            self._counters.failed += 1
        self._forget(live, now)
        return Failed(live.request.id, failure, message, live.emitted)

    def _end(self, sequence: LiveSequence) -> None:
        """End a sequence in the pool and for speculation."""
        self._pool.end(sequence)
        self._speculator.ended(sequence)

    def _forget(self, live: LiveRequest, now: float) -> None:
        """Forget a request that has ended, but for what `ended` keeps of it."""
        del self._live[live.request.id]
        self._pool.queue.leave(live.account)
        self._admission.ended(live, now)
        self.ended.add(live, now)
        if len(self._deadlines) > 2 * len(self._live) + 64:  # or ended requests stay until their deadline
            self._deadlines = [entry for entry in self._deadlines if self._is_live(entry[2])]
            heapify(self._deadlines)

    def _is_live(self, live: LiveRequest) -> bool:
        return self._live.get(live.request.id) is live

    def next_deadline(self) -> float | None:
        """The earliest deadline of a live request; None if none has one. `deadlines` may become False."""
        heap = self._deadlines
        while heap and not self._is_live(heap[0][2]):
            heappop(heap)
        return heap[0][0] if heap else None

    @property
    def deadlines(self) -> bool:
        """Some live request may have a deadline. `next_deadline` drops those of requests that have ended."""
        return bool(self._deadlines)

    def past_deadline(self, now: float) -> Iterator[LiveRequest]:
        """The requests whose deadline has passed; the caller fails each before it asks for the next."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            yield self._deadlines[0][2]

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        assert all(not live.ended for live in self), "an ended request is live"
        queued = [live for live in self if not live.started]
        assert self._admission.trials == sum(live.is_trial for live in self), "trials are miscounted"
        self._admission.check_integrity(queued)
        sequences = [s for live in self for s in live.sequences]
        for s in sequences:
            held = s.state is SequenceState.HELD
            assert not held or (s.leader is not None and s.leader.state is not SequenceState.ENDED), (
                "a sequence is held although its leader has ended"
            )
        self._pool.check_integrity(sequences)


def max_tokens(request: Request, limits: JointLimits) -> int:
    """Maximum of output tokens of each completion."""
    if request.evaluation is not None:
        return 0
    if request.max_tokens is not None:
        return request.max_tokens
    return limits.request_tokens - len(request.prompt)


def _tokens_in_turn(request: Request, limits: JointLimits) -> int:
    """Tokens of a single prompt that takes as many steps as those of the request, which share steps."""
    if request.evaluation is None:
        return request.input_tokens
    shared = -(-request.evaluation.tokens * limits.chunk_tokens // limits.step_tokens)
    return max(request.evaluation.longest, shared)


def misfit(request: Request, limits: JointLimits) -> tuple[str, str] | None:
    """The field, and what is wrong with it, if a completion could not even run alone; None if it could."""
    if request.adapter and not limits.adapter_slots:
        return "model", "is an adapter, and the executor has none"
    if request.evaluation is not None:
        return request.evaluation.misfit(limits.request_tokens)
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
