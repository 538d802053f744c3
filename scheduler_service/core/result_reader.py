"""Applies a step's answer: new tokens of its sequences, ends, and sequences that are queued again."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from itertools import chain

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.drafting.speculator import Speculator
from scheduler_service.core.events import EndReason, Event, Failure, PromptScores, PromptVector, Tokens
from scheduler_service.core.in_flight import SentStep
from scheduler_service.core.registry import Registry
from scheduler_service.core.request import DraftSource
from scheduler_service.core.schedule import ScheduledOpening, ScheduledRow
from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.sequence_pool import SequencePool
from scheduler_service.core.snapshot import Totals
from scheduler_service.core.speculation.draft_state import DraftState
from scheduler_service.core.states import SequenceState
from scheduler_service.core.step import Code, RefusalCause, RowAnswer, RowMode, StepAnswer
from scheduler_service.core.step_log import StepEvent

_STALE = frozenset({Code.NOT_FOUND, Code.ALREADY_EXISTS, Code.FAILED_PRECONDITION})
"""Codes of a row whose cache is not in the executor as the core believes: it is opened again."""


class Shortage(enum.Flag):
    """What the executor had not enough of. The caller should wait before it asks for more."""

    NONE = 0
    ROOM = enum.auto()  # pages, places for sequences, an adapter that it lacks at the moment; or it drains
    SLOTS = enum.auto()  # for adapters


class ResultReader:
    """Applies answers, row by row, to the registry and the pool."""

    def __init__(
        self,
        config: CoreConfig,
        registry: Registry,
        pool: SequencePool,
        speculator: Speculator,
        counters: Totals,
    ) -> None:
        self._config = config
        self._registry = registry
        self._pool = pool
        self._speculator = speculator
        self._counters = counters

    def read(self, step: SentStep, result: StepAnswer, now: float) -> tuple[list[Event], Shortage]:
        """Apply the answer to `step`. Returns the events, and what the executor was short of."""
        events: list[Event] = []
        short, starved = Shortage.NONE, False
        for fork, answer in zip(step.forks, result.forks, strict=True):
            if answer.code and fork.sequence.cache_id == fork.cache_id:
                short |= self._refused(fork.sequence, answer, events, now)
        items: Iterator[ScheduledRow | ScheduledOpening] = chain(step.rows, step.openings)
        for item, answer in zip(items, result.rows, strict=True):
            if item.sequence.cache_id != item.cache_id:
                continue
            if not answer.code:
                sequence = item.sequence
                if sequence.next_score < sequence.prompt_length and not self._scored(
                    sequence, answer, events, now
                ):
                    continue
                if answer.tokens:
                    self._sampled(item, answer, events, now)
                elif sequence.end_kv:
                    self._evaluated(sequence, answer, events, now)
                else:
                    self._advanced(sequence, answer, events, now)
            elif lacking := self._refused_row(item, answer, events, now):
                short |= lacking
                starved |= item.sequence.cache_id > 0 and not item.drafts
        if starved and self._pool.running:
            self._pool.preempt(self._pool.last_in_turn())
        return events, short

    def _sampled(
        self, item: ScheduledRow | ScheduledOpening, answer: RowAnswer, events: list[Event], now: float
    ) -> None:
        sequence, tokens = item.sequence, answer.tokens
        before = len(sequence.tokens)
        if answer.kv_length != before + len(tokens) - 1:
            self._stale(sequence, f"its KV length is {answer.kv_length}, which does not add up", events, now)
            return
        if sequence.state is not SequenceState.RUNNING:
            self._prefilled(sequence, answer, now)
        end = sequence.extend(tokens, answer.kv_length)
        count = len(sequence.tokens) - before
        self._counters.completion_tokens += count
        if item.drafts and sequence.draft_state is not None and isinstance(item, ScheduledRow):
            accepted = min(len(tokens) - 1, count)
            self._verified(sequence.draft_state, item.source, len(item.drafts), accepted)
        logprobs, live = answer.logprobs, sequence.live
        if (
            logprobs and live.request.prompt_logprobs is not None
        ):  # it may have asked for fewer than its prompt
            k = live.request.sampling.logprobs
            logprobs = () if k is None else [one.cut(k) for one in logprobs]
        news = Tokens(
            live.request.id,
            sequence.index,
            tuple(tokens) if count == len(tokens) else tuple(tokens[:count]),
            tuple(logprobs[:count]) if logprobs else (),
        )
        if not live.emitted:
            live.emitted = True
            news.cached_tokens = live.cached or 0
        events.append(news)
        if answer.forced and end is None:
            self._speculator.force(sequence, answer.forced)
        if end is not None:
            events.append(self._registry.finish(sequence, *end, now))
        elif sequence.losses and sequence.got_on:
            self._pool.end_isolation(sequence)

    def _verified(self, drafts: DraftState, source: DraftSource, drafted: int, accepted: int) -> None:
        counters = self._counters
        counters.verifications += 1
        counters.drafted_tokens += drafted
        counters.accepted_tokens += accepted
        if source is DraftSource.GRAMMAR:
            counters.grammar_drafted_tokens += drafted
            counters.grammar_accepted_tokens += accepted
        drafts.verified(source, drafted, accepted)

    def _refused_row(
        self, row: ScheduledRow | ScheduledOpening, answer: RowAnswer, events: list[Event], now: float
    ) -> Shortage:
        """Handle a refused row; returns what the executor was short of."""
        sequence = row.sequence
        if sequence.refuse_row():
            return Shortage.NONE  # it was sent to follow a row that was refused
        if row.drafts and answer.code not in _STALE:  # perhaps for its drafts: the next row has none
            self._speculator.refused(sequence)
            if answer.code is not Code.RESOURCE_EXHAUSTED or answer.cause is RefusalCause.GRAMMAR_BEHIND:
                return Shortage.NONE
            return Shortage.ROOM
        return self._refused(sequence, answer, events, now)

    def _prefilled(self, sequence: LiveSequence, answer: RowAnswer, now: float) -> None:
        self._note_hit(sequence, answer)
        self._counters.prefilled_tokens += answer.kv_length - max(sequence.kv, answer.cached_length)
        sequence.prefill(now)
        self._pool.prefilled(sequence)

    def _advanced(self, sequence: LiveSequence, answer: RowAnswer, events: list[Event], now: float) -> None:
        if not sequence.kv < answer.kv_length < len(sequence.tokens):
            self._stale(sequence, f"its KV length is {answer.kv_length} and it sampled nothing", events, now)
            return
        self._note_hit(sequence, answer)
        self._counters.prefilled_tokens += answer.kv_length - max(sequence.kv, answer.cached_length)
        sequence.advance(answer.kv_length)

    def _scored(self, sequence: LiveSequence, answer: RowAnswer, events: list[Event], now: float) -> bool:
        """Take the scores of a row whose sequence still lacks some; False if they are not what is due."""
        due = min(answer.kv_length + 1, sequence.prompt_length) - sequence.next_score
        scores = answer.scores
        if due <= 0:
            return True
        if scores is None or scores.first != sequence.next_score or len(scores.logprobs) != due:
            self._stale(sequence, f"it brought no scores from token {sequence.next_score} on", events, now)
            return False
        live = sequence.live
        scores = scores.cut(live.request.prompt_logprobs or 0)
        events.append(PromptScores(live.request.id, sequence.index, scores))
        sequence.score(sequence.next_score + due)
        if not sequence.end_kv:
            live.emitted = True
        return True

    def _evaluated(self, sequence: LiveSequence, answer: RowAnswer, events: list[Event], now: float) -> None:
        """Take a row of an input; its last one ends it."""
        kv, live = answer.kv_length, sequence.live
        is_last = kv >= sequence.end_kv
        if not sequence.kv < kv <= len(sequence.tokens) or (
            is_last and sequence.mode is RowMode.HIDDEN and answer.hidden is None
        ):
            self._stale(sequence, f"its KV length is {kv}, or it brought no vector", events, now)
            return
        self._note_hit(sequence, answer)
        self._counters.prefilled_tokens += kv - max(sequence.kv, answer.cached_length)
        sequence.advance(kv)
        if not is_last:
            return
        if sequence.mode is RowMode.HIDDEN and answer.hidden is not None:
            events.append(PromptVector(live.request.id, sequence.index, answer.hidden))
        events.append(self._registry.finish(sequence, EndReason.EVALUATED, None, now))

    def _note_hit(self, sequence: LiveSequence, answer: RowAnswer) -> None:
        if sequence.state is not SequenceState.OPENING:
            return
        # A fork's row has no prefix hit: its cache began with the tokens that were copied.
        found = answer.cached_length or sequence.kv
        self._counters.cached_tokens += sequence.note_cache(found)
        kind = StepEvent.RESUMED if sequence.evictions else StepEvent.ADMITTED
        self._pool.log.note(kind, sequence.live, sequence.index, found)

    def _refused(
        self, sequence: LiveSequence, answer: RowAnswer, events: list[Event], now: float
    ) -> Shortage:
        """Treat a refused row by the code of the answer.

        An opening for which the executor has no room, or not its adapter, is queued again; a running sequence
        is left as it is. A stale cache is opened again, up to `max_refusals` times in a row. Anything else
        fails the request.

        Returns what the executor was short of, which is no fault of the sequence.
        """
        code, opening = answer.code, sequence.state is SequenceState.OPENING
        lacks_adapter = answer.cause is RefusalCause.ADAPTER  # the caller has it loaded again
        if code is Code.RESOURCE_EXHAUSTED or (opening and (code is Code.UNAVAILABLE or lacks_adapter)):
            if opening:
                self._pool.requeue(sequence)
            if answer.cause is RefusalCause.GRAMMAR_BEHIND:
                if not opening:
                    return Shortage.NONE  # its row is sent with every step until the output has been read
                sequence.fall_behind()
            return Shortage.SLOTS if answer.cause is RefusalCause.ADAPTER_SLOTS else Shortage.ROOM
        if code in _STALE:
            self._stale(sequence, answer.message, events, now)
        elif answer.cause is RefusalCause.GRAMMAR:
            events.append(self._registry.fail(sequence.live, Failure.GRAMMAR, answer.message, now))
        elif code is Code.INTERNAL:
            events.append(self._registry.fail(sequence.live, Failure.NOT_FINITE, answer.message, now))
        else:
            events.append(self._registry.fail(sequence.live, Failure.REFUSED, answer.message, now))
        return Shortage.NONE

    def _stale(self, sequence: LiveSequence, message: str, events: list[Event], now: float) -> None:
        """The cache is not as recorded here: open another one, or fail the request if that happened often."""
        if sequence.count_refusal() > self._config.max_refusals:
            events.append(self._registry.fail(sequence.live, Failure.REFUSED, message, now))
        else:
            self._pool.preempt(sequence)
