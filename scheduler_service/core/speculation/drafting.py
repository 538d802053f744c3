"""The draft executor's caches: which of our sequences it knows, how far, and what it drafts next.

What a draft cache holds follows the target without being told: after k drafts on top of n + 1 known
tokens its KV length is n + k; whatever the verification accepted, the longest common prefix of
what it holds and what is known by then stays, the rest is truncated in the step that next needs it,
and that step's row feeds all known tokens after it. A row that follows full acceptance thus feeds
[d_k, t_k+1], one that follows a rejection the one token that came instead, and one that follows
plain decoding, or a late answer, as many as were missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.errors import UnknownStep
from scheduler_service.core.policy import Limits
from scheduler_service.core.sequence import Sequence
from scheduler_service.core.speculation.step_time import Work
from scheduler_service.core.step import Capacity, Opening, Plan, Result, Row, RowResult, Truncate

BACKOFF_TOKENS = 16
"""After the draft executor refused a sequence: so many tokens are decoded without it, doubled each time."""


@dataclass(slots=True, eq=False)
class DraftCache:
    """One sequence's cache on the draft executor."""

    sequence: Sequence
    target_id: int  # the target cache it goes with, and ends with
    cache_id: int
    given: int  # known tokens that it was opened with; those it has not computed are pending there
    kv: int = 0
    shared: int = 0  # the first so many of `kv` are known tokens
    sampled: list[int] = field(default_factory=list)  # after those; all but the last are in the KV too

    @property
    def valid(self) -> int:
        """How many known tokens the KV holds, leaving one to feed at least."""
        tokens, valid = self.sequence.tokens, self.shared
        most = len(tokens) - 1
        for draft in self.sampled[: self.kv - valid]:
            if valid >= most or tokens[valid] != draft:
                break
            valid += 1
        return min(valid, most)

    @property
    def lag(self) -> int:
        """Known tokens that the next row has to feed."""
        return len(self.sequence.tokens) - self.valid


@dataclass(slots=True)
class Drafted:
    """What one sequence got: drafts that follow its first `known` tokens; none if it was refused."""

    sequence: Sequence
    known: int
    drafts: list[int]


@dataclass(slots=True)
class DraftStep:
    """The step in flight."""

    plan: Plan
    parts: list[tuple[DraftCache, int]]  # rows, then openings: how many known tokens it has computed then
    work: Work
    sent_at: float


class DraftBook:
    """Plans and reads the draft executor's steps, one at a time."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._limits: Limits | None = None
        self._max_steps = 1
        self._caches: dict[Sequence, DraftCache] = {}
        self._releases: list[int] = []
        self._barred: dict[Sequence, tuple[int, int]] = {}  # refused how often, and until how many tokens
        self._number = 0
        self._last_cache_id = 0  # never used twice, whatever the session
        self._pages = 0  # available as of the last reply
        self.step: DraftStep | None = None  # in flight

    @property
    def connected(self) -> bool:
        """A draft executor is there."""
        return self._limits is not None

    def ready(self, capacity: Capacity) -> None:
        """A draft executor that holds nothing of ours is there."""
        self._limits = Limits.of(self._config, capacity)
        self._max_steps = capacity.max_steps
        self._pages = capacity.total_pages

    def lost(self) -> None:
        """It is gone with all that it held: nothing of it is remembered."""
        self._limits = None
        self._caches.clear()
        self._barred.clear()
        self._releases.clear()
        self.step = None

    def in_flight(self) -> list[Sequence]:
        """Whom the step in flight computes."""
        return [cache.sequence for cache, _ in self.step.parts] if self.step else []

    def has(self, sequence: Sequence) -> bool:
        """It holds a cache of this sequence."""
        return sequence in self._caches

    def most_drafts(self, sequence: Sequence) -> int:
        """Drafts that it could make of this sequence in a step; 0 while it is behind or full."""
        cache, limits = self._caches.get(sequence), self._limits
        if cache is None or limits is None or cache.target_id != sequence.cache_id:
            return 0
        lag = cache.lag
        if lag > limits.chunk_tokens:
            return 0
        room = limits.request_tokens - len(sequence.tokens) + 1  # the last draft is not cached
        return max(0, min(self._max_steps, room, limits.step_tokens - lag + 1))

    def pending(self, sequence: Sequence) -> int:
        """Known tokens that its next row has to feed."""
        return self._caches[sequence].lag

    # -- planning --------------------------------------------------------------------------------

    def plan(
        self, wanting: Iterable[tuple[Sequence, int]], following: Iterable[Sequence], now: float
    ) -> Plan | None:
        """The next step: drafts for `wanting` (sequence, how many), and what else of `following` it still
        has to learn, as far as seats, tokens and pages go. None while one is in flight or without need.

        The caller asks for no more than `most_drafts`.
        """
        limits = self._limits
        if limits is None or self.step is not None:
            return None
        self._reap()
        builder = _Builder(limits, self._pages)
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

    def _send(self, builder: _Builder, now: float) -> Plan | None:
        if not (builder.rows or builder.openings or self._releases):
            return None
        self._number += 1
        plan = Plan(
            self._number,
            tuple(self._releases),
            rows=tuple(builder.rows),
            openings=tuple(builder.openings),
            truncates=tuple(builder.truncates),
        )
        self._releases.clear()
        self.step = DraftStep(plan, builder.fed + builder.opened, builder.work, now)
        return plan

    def _open(self, sequence: Sequence, builder: _Builder, budget: int) -> None:
        assert self._limits is not None
        known, barred = len(sequence.tokens), self._barred.get(sequence)
        if len(self._caches) >= self._limits.seats or known >= self._limits.request_tokens:
            return
        if barred is not None and known < barred[1]:
            return
        cache = DraftCache(sequence, sequence.cache_id, self._last_cache_id + 1, given=known)
        if builder.open(cache, budget):
            self._last_cache_id += 1
            self._caches[sequence] = cache

    def _reap(self) -> None:
        """Let go of the caches of all that gave up their target cache, in whatever way."""
        for sequence, cache in list(self._caches.items()):
            if sequence.cache_id != cache.target_id:
                self._release(sequence)
        for sequence in [s for s in self._barred if not s.cache_id]:
            del self._barred[sequence]

    def _release(self, sequence: Sequence) -> None:
        self._releases.append(self._caches.pop(sequence).cache_id)

    def _bar(self, sequence: Sequence) -> None:
        """There is no room for it, or it was refused: it goes without for a while."""
        self._release(sequence)
        times = self._barred.get(sequence, (0, 0))[0] + 1
        self._barred[sequence] = times, len(sequence.tokens) + (BACKOFF_TOKENS << min(times - 1, 10))

    # -- answers ---------------------------------------------------------------------------------

    def apply(self, result: Result) -> list[Drafted]:
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
        ]

    def _answered(self, cache: DraftCache, end: int, answer: RowResult) -> Drafted:
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

    # -- what is promised ------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        ids = [cache.cache_id for cache in self._caches.values()] + self._releases
        assert len(ids) == len(set(ids)), "a draft cache is held twice, or held and released"
        assert all(i <= self._last_cache_id for i in ids), "a draft cache id from nowhere"
        assert self.connected or not (ids or self.step or self._barred), "something is left of a lost drafter"


class _Builder:
    """A draft step in the making, within rows, tokens and pages."""

    def __init__(self, limits: Limits, pages: int) -> None:
        self._limits = limits
        self._pages = pages
        self.tokens_left = limits.step_tokens
        self.rows: list[Row] = []
        self.openings: list[Opening] = []
        self.truncates: list[Truncate] = []
        self.fed: list[tuple[DraftCache, int]] = []  # of the rows, as in `DraftStep.parts`
        self.opened: list[tuple[DraftCache, int]] = []  # of the openings
        self.work = Work(0, 0)

    @property
    def full(self) -> bool:
        """No row and no token is left."""
        return self.tokens_left < 1 or len(self.rows) + len(self.openings) >= self._limits.seats

    def feed(self, cache: DraftCache, drafts: int, budget: int) -> bool:
        """A row that catches up by at most `budget` tokens and then drafts, or less if the step gets full.

        False if there are not enough pages for it.
        """
        if self.full:
            return True  # next time
        tokens, valid = cache.sequence.tokens, cache.valid
        known = len(tokens)
        end = min(known, valid + min(budget, self.tokens_left))
        steps = max(1, min(drafts, self.tokens_left - (end - valid) + 1)) if end == known else 1
        computed = end + steps - 1
        page_size = self._limits.page_size
        copies = valid < cache.kv and valid % page_size > 0  # of a last page that may be shared
        if not self._take(self._limits.pages(computed) - self._limits.pages(valid) + copies):
            return False
        pending = max(0, cache.given - cache.kv)
        if pending and (end < cache.given or end == cache.given == known):
            row = Row(cache.cache_id, valid, limit=end - valid if end < cache.given else 0, steps=steps)
        else:
            if valid < cache.kv or pending:
                self.truncates.append(Truncate(cache.cache_id, valid))
                cache.given = 0
            row = Row(cache.cache_id, valid, tokens=tuple(tokens[valid:end]), steps=steps)
        self.rows.append(row)
        self.fed.append((cache, end))
        self._note(end - valid, computed, steps)
        return True

    def open(self, cache: DraftCache, budget: int) -> bool:
        """Open the cache, with all known tokens, and compute at most `budget` of them. False: no room."""
        sequence = cache.sequence
        known = len(sequence.tokens)
        if self.full or not self._take(self._limits.pages(known + 1)):
            return False
        fed = min(known, budget, self.tokens_left)
        live = sequence.live
        self.openings.append(
            Opening(
                cache_id=cache.cache_id,
                tokens=tuple(sequence.tokens),
                prompt_length=sequence.prompt_length,
                limit=fed,
                sampling=replace(sequence.sampling, logprobs=None),
                stop_token_ids=live.stop_token_ids,
                min_tokens=live.request.min_tokens,
                salt=live.request.salt,
            )
        )
        self.opened.append((cache, known))
        self._note(fed, fed, 1)
        return True

    def _take(self, pages: int) -> bool:
        if pages > self._pages:
            return False
        self._pages -= pages
        return True

    def _note(self, fed: int, context: int, steps: int) -> None:
        self.tokens_left -= fed + steps - 1
        work = self.work
        work.rows += 1
        work.tokens += fed
        work.context += context
        work.steps = max(work.steps, steps)
