"""Reads a step's result: what each sequence learned, whom it ends, whom it sends back to the queue."""

from __future__ import annotations

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.drafting.speculator import Speculator
from scheduler_service.core.events import Event, Failure, Tokens
from scheduler_service.core.in_flight import SentStep
from scheduler_service.core.registry import Registry
from scheduler_service.core.roster import Roster
from scheduler_service.core.schedule import ScheduledRow
from scheduler_service.core.sequence import Sequence
from scheduler_service.core.snapshot import Counters
from scheduler_service.core.speculation.draft_state import DraftState
from scheduler_service.core.states import State, Trigger
from scheduler_service.core.step import Code, Result, RowResult

_STALE = frozenset({Code.NOT_FOUND, Code.ALREADY_EXISTS, Code.FAILED_PRECONDITION})
"""Answers that say: our view of the cache is wrong. Opening it again mends that."""


class Answers:
    """Applies one result to registry and roster."""

    def __init__(
        self,
        config: CoreConfig,
        registry: Registry,
        roster: Roster,
        speculator: Speculator,
        counters: Counters,
    ) -> None:
        self._config = config
        self._registry = registry
        self._roster = roster
        self._speculator = speculator
        self._counters = counters

    def read(self, step: SentStep, result: Result, now: float) -> tuple[list[Event], bool]:
        """The events, and whether the executor was short of something: then do not ask at once for more."""
        events: list[Event] = []
        short = starved = False
        for fork, answer in zip(step.forks, result.forks, strict=True):
            if answer.code and fork.sequence.cache_id == fork.cache_id:
                short |= self._refused(fork.sequence, answer, events, now)
        rows = len(step.rows)
        for row, answer in zip(step.rows, result.rows[:rows], strict=True):
            sequence = row.sequence
            if sequence.cache_id != row.cache_id:
                continue
            sequence.in_flight -= 1
            if not answer.code:
                self._answered(sequence, len(row.drafts), answer, events, now)
            elif self._refused_row(row, answer, events, now):
                short = True
                starved |= sequence.cache_id > 0 and not row.drafts
        for opening, answer in zip(step.openings, result.rows[rows:], strict=True):
            sequence = opening.sequence
            if sequence.cache_id != opening.cache_id:
                continue
            sequence.in_flight -= 1
            if not answer.code:
                self._answered(sequence, 0, answer, events, now)
            else:
                short |= self._refused(sequence, answer, events, now)
        if starved and self._roster.running:
            self._roster.preempt(self._roster.last_in_turn())
        return events, short

    def _answered(
        self, sequence: Sequence, drafted: int, answer: RowResult, events: list[Event], now: float
    ) -> None:
        known, tokens = sequence.tokens, answer.tokens
        if not tokens:
            self._advanced(sequence, answer, events, now)
            return
        if answer.kv_length != len(known) + len(tokens) - 1:
            self._stale(sequence, f"its KV length is {answer.kv_length}, which does not add up", events, now)
            return
        if sequence.state is not State.RUNNING:
            self._prefilled(sequence, answer, now)
        sequence.kv = answer.kv_length
        sequence.tail_shared = False
        sequence.refusals = 0
        stops, room = sequence.live.stops, sequence.end_length - len(known)
        end = None
        count = 0
        for token in tokens:
            known.append(token)
            count += 1
            if (token in stops or count >= room) and (end := sequence.verdict()):
                break
        self._counters.completion_tokens += count
        if drafted and sequence.draft_state is not None:
            self._verified(sequence.draft_state, drafted, min(len(tokens) - 1, count))
        logprobs, live = answer.logprobs, sequence.live
        news = Tokens(
            live.request.id,
            sequence.index,
            tuple(tokens[:count]),
            tuple(logprobs[:count]) if logprobs else (),
        )
        if not live.emitted:
            live.emitted = True
            news.cached_tokens = sequence.cached or 0
        events.append(news)
        if end is not None:
            events.append(self._registry.finish(sequence, *end, now))
        elif sequence.losses and len(known) > sequence.lost_at:
            self._roster.clear(sequence)

    def _verified(self, drafts: DraftState, drafted: int, accepted: int) -> None:
        counters = self._counters
        counters.verifications += 1
        counters.drafted_tokens += drafted
        counters.accepted_tokens += accepted
        drafts.verified(drafted, accepted)

    def _refused_row(self, row: ScheduledRow, answer: RowResult, events: list[Event], now: float) -> bool:
        """True if the executor was short of something."""
        sequence = row.sequence
        sequence.foreseen = False
        if row.kv_length != sequence.kv:
            return False  # it was sent ahead, to follow a row that was refused
        if row.drafts and answer.code not in _STALE:  # which may be why: its next one has none
            self._speculator.refused(sequence)
            return answer.code is Code.RESOURCE_EXHAUSTED
        return self._refused(sequence, answer, events, now)

    def _prefilled(self, sequence: Sequence, answer: RowResult, now: float) -> None:
        self._note_hit(sequence, answer)
        self._counters.prefilled_tokens += answer.kv_length - max(sequence.kv, answer.cached_length)
        sequence.happen(Trigger.SAMPLE)
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        if sequence.index == 0:
            self._roster.unhold(sequence.live)

    def _advanced(self, sequence: Sequence, answer: RowResult, events: list[Event], now: float) -> None:
        if not sequence.kv < answer.kv_length < len(sequence.tokens):
            self._stale(sequence, f"its KV length is {answer.kv_length} and it sampled nothing", events, now)
            return
        self._note_hit(sequence, answer)
        self._counters.prefilled_tokens += answer.kv_length - max(sequence.kv, answer.cached_length)
        sequence.happen(Trigger.CHUNK)
        sequence.kv = answer.kv_length

    def _note_hit(self, sequence: Sequence, answer: RowResult) -> None:
        if sequence.state is not State.OPENING:
            return
        # A fork's row has no prefix hit, but starts where it was forked.
        hit = answer.cached_length or sequence.kv
        sequence.shared_tokens = hit
        if sequence.cached is None:
            sequence.cached = hit
            self._counters.cached_tokens += hit

    def _refused(self, sequence: Sequence, answer: RowResult, events: list[Event], now: float) -> bool:
        """True if the executor was short of something, which is no fault of the sequence."""
        code, opening = answer.code, sequence.state is State.OPENING
        if code is Code.RESOURCE_EXHAUSTED or (code is Code.UNAVAILABLE and opening):
            if opening:
                self._roster.requeue(sequence)
            return True
        if code in _STALE:
            self._stale(sequence, answer.message, events, now)
        elif code is Code.INTERNAL:
            events.append(self._registry.fail(sequence.live, Failure.NOT_FINITE, answer.message, now))
        else:
            events.append(self._registry.fail(sequence.live, Failure.REFUSED, answer.message, now))
        return False

    def _stale(self, sequence: Sequence, message: str, events: list[Event], now: float) -> None:
        """Our view of its cache is wrong: open it again, unless that keeps happening."""
        sequence.refusals += 1
        if sequence.refusals > self._config.max_refusals:
            events.append(self._registry.fail(sequence.live, Failure.REFUSED, message, now))
        else:
            self._roster.preempt(sequence)
