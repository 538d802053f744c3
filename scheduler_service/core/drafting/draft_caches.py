"""The caches on the draft executor: which sequences have one, what it holds, what the next step computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.drafting.draft_cache import DraftCache
from scheduler_service.core.drafting.draft_step import DraftStep, DraftStepBuilder
from scheduler_service.core.errors import UnknownStep
from scheduler_service.core.joint_limits import JointLimits
from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.step import Capacity, PlannedStep, RowAnswer, StepAnswer

BACKOFF_TOKENS = 16
"""Tokens that a sequence decodes without the draft executor after a refusal; doubled with each refusal."""


@dataclass(slots=True)
class Drafted:
    """Drafts of one sequence, which follow its first `known` tokens; no drafts if it was refused."""

    sequence: LiveSequence
    known: int
    drafts: list[int]


class DraftCaches:
    """Plans and reads the draft executor's steps, one at a time."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._limits: JointLimits | None = None
        self._max_steps = 1
        self._caches: dict[LiveSequence, DraftCache] = {}
        self._releases: list[int] = []
        self._barred: dict[LiveSequence, tuple[int, int]] = {}  # number of refusals; known tokens at the end
        self._number = 0
        self._last_cache_id = 0  # an id is never used twice, not even in another session
        self._pages = 0  # available as of the last reply
        self.step: DraftStep | None = None  # in flight

    @property
    def connected(self) -> bool:
        """A draft executor is connected."""
        return self._limits is not None

    def ready(self, capacity: Capacity) -> None:
        """A draft executor without our caches connected."""
        self._limits = JointLimits.of(self._config, capacity)
        self._max_steps = capacity.max_steps
        self._pages = capacity.total_pages

    def lost(self) -> None:
        """The draft executor is gone with its caches: forget them."""
        self._limits = None
        self._caches.clear()
        self._barred.clear()
        self._releases.clear()
        self.step = None

    def in_flight(self) -> list[LiveSequence]:
        """The sequences that the step in flight computes."""
        return [cache.sequence for cache, _ in self.step.parts] if self.step else []

    def has(self, sequence: LiveSequence) -> bool:
        """The draft executor has a cache of this sequence."""
        return sequence in self._caches

    def most_drafts(self, sequence: LiveSequence) -> int:
        """Drafts that a step can make for this sequence; 0 while its cache is far behind, full or missing."""
        cache, limits = self._caches.get(sequence), self._limits
        if cache is None or limits is None or cache.target_id != sequence.cache_id:
            return 0
        lag = cache.lag
        if lag > limits.chunk_tokens:
            return 0
        room = limits.request_tokens - len(sequence.tokens) + 1  # the last draft is not cached
        return max(0, min(self._max_steps, room, limits.step_tokens - lag + 1))

    def pending(self, sequence: LiveSequence) -> int:
        """Known tokens that its next row has to feed."""
        return self._caches[sequence].lag

    # -- planning --------------------------------------------------------------------------------

    def plan(
        self, wanting: Iterable[tuple[LiveSequence, int]], following: Iterable[LiveSequence], now: float
    ) -> PlannedStep | None:
        """The next step; None without a draft executor, while a step is in flight, or if none is needed.

        It makes drafts for `wanting` (pairs of a sequence and a number of drafts, at most `most_drafts`), and
        opens or fills caches of `following`, as far as places, tokens and pages go. A cache whose
        row lacks pages is released, and its sequence gets none for a while; one that finds the step full is
        kept.
        """
        limits = self._limits
        if limits is None or self.step is not None:
            return None
        self._reap()
        builder = DraftStepBuilder(limits, self._pages)
        for sequence, drafts in wanting:
            if not builder.feed(self._caches[sequence], drafts, limits.chunk_tokens):
                self._bar(sequence)
        budget = limits.chunk_tokens
        for sequence in following:
            before = builder.tokens_left
            cache = self._caches.get(sequence)
            if cache is None:
                self._open(sequence, builder, budget)
            elif cache.lag > limits.chunk_tokens and not builder.feed(cache, 0, budget):
                self._bar(sequence)
            budget -= before - builder.tokens_left
            if builder.full or budget < 1:
                break
        return self._send(builder, now)

    def _send(self, builder: DraftStepBuilder, now: float) -> PlannedStep | None:
        """Make a plan of what the builder has and of the releases that wait; None: there is nothing to do."""
        if not (builder.rows or builder.openings or self._releases):
            return None
        self._number += 1
        plan = PlannedStep(
            self._number,
            tuple(self._releases),
            rows=tuple(builder.rows),
            openings=tuple(builder.openings),
            truncates=tuple(builder.truncates),
        )
        self._releases.clear()
        self.step = DraftStep(plan, builder.fed + builder.opened, builder.work, now)
        return plan

    def _open(self, sequence: LiveSequence, builder: DraftStepBuilder, budget: int) -> None:
        """Open a cache for a sequence, unless it may have none now, or the step is full."""
        assert self._limits is not None
        known, barred = len(sequence.tokens), self._barred.get(sequence)
        if len(self._caches) >= self._limits.max_sequences or known >= self._limits.request_tokens:
            return
        if barred is not None and known < barred[1]:
            return
        cache = DraftCache(sequence, sequence.cache_id, self._last_cache_id + 1, given=known)
        if builder.open(cache, budget):
            self._last_cache_id += 1
            self._caches[sequence] = cache

    def _reap(self) -> None:
        """Release the caches of sequences that have lost their target cache."""
        for sequence, cache in list(self._caches.items()):
            if sequence.cache_id != cache.target_id:
                self._release(sequence)
        for sequence in [s for s in self._barred if not s.cache_id]:
            del self._barred[sequence]

    def forget(self, sequence: LiveSequence) -> None:
        """A sequence has ended: release its cache in the next step; an answer about it is ignored."""
        self._barred.pop(sequence, None)
        if sequence in self._caches:
            self._release(sequence)

    def _release(self, sequence: LiveSequence) -> None:
        """Release a sequence's cache in the next step."""
        self._releases.append(self._caches.pop(sequence).cache_id)

    def _bar(self, sequence: LiveSequence) -> None:
        """Release a refused sequence's cache, and open none for it for a while."""
        self._release(sequence)
        times = self._barred.get(sequence, (0, 0))[0] + 1
        self._barred[sequence] = times, len(sequence.tokens) + (BACKOFF_TOKENS << min(times - 1, 10))

    # -- answers ---------------------------------------------------------------------------------

    def apply(self, result: StepAnswer) -> list[Drafted]:
        """Take the answer of the step in flight. Raises UnknownStep, and has changed nothing then."""
        step = self.step
        if step is None or step.plan.number != result.number:
            raise UnknownStep(f"no draft step in flight is answered by {result.number}")
        if len(result.rows) != len(step.parts):
            raise UnknownStep(f"the answer to draft step {result.number} has another number of rows")
        self.step = None
        self._pages = result.free_pages + result.evictable_pages
        return [
            self._answered(cache, end, answer)
            for (cache, end), answer in zip(step.parts, result.rows, strict=True)
            if self._caches.get(cache.sequence) is cache
        ]

    def _answered(self, cache: DraftCache, end: int, answer: RowAnswer) -> Drafted:
        """Take one row's answer: its drafts, and its cache's length. A refused row's cache is released."""
        sequence, tokens = cache.sequence, answer.tokens
        drafted = Drafted(sequence, end, [])
        whole = answer.kv_length == end + len(tokens) - 1 if tokens else cache.kv < answer.kv_length <= end
        if answer.code or not whole:
            self._bar(sequence)
            return drafted
        cache.kv = answer.kv_length
        cache.shared, cache.sampled = (end, tokens) if tokens else (answer.kv_length, [])
        drafted.drafts = tokens
        return drafted

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        ids = [cache.cache_id for cache in self._caches.values()] + self._releases
        assert len(ids) == len(set(ids)), "a draft cache is held twice, or held and released"
        assert all(i <= self._last_cache_id for i in ids), "a draft cache id that was never given"
        assert self.connected or not (ids or self.step or self._barred), "something is left of a lost drafter"
