"""A small executor for the core's tests, written from executor.proto's comments: pages and exact contents.

It samples a hash of all cached content and the seed, so a wrong length, fork or re-opening gives
another token at once. It has no prefix cache; its ledger is a reference count per page.
Other texts serve the traces: one that repeats, and one that a draft model gets right most of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_service.core.step import (
    CacheFork,
    CacheOpening,
    CacheRow,
    CacheTruncation,
    Capacity,
    Code,
    PlannedStep,
    RowAnswer,
    StepAnswer,
)

VOCABULARY = 1000


Text = Callable[[int, list[int]], int]
"""The token that follows the given content under the given seed."""


def next_token(seed: int, content: list[int]) -> int:
    """What follows `content` under `seed`."""
    value = seed + 1
    for token in content:
        value = (value * 6364136223846793005 + token + 1442695040888963407) % (1 << 64)
    return (value >> 33) % VOCABULARY


def repeating(period: int, share: float) -> Text:
    """Repeats the token that stands `period` tokens back at a share of the positions, else `next_token`."""

    def text(seed: int, content: list[int]) -> int:
        token = next_token(seed, content)
        return content[-period] if len(content) >= period and _falls_within(share, token) else token

    return text


def agreeing(text: Text, share: float) -> Text:
    """A draft model of `text`: the same token at a share of the positions, else the one after it."""

    def draft(seed: int, content: list[int]) -> int:
        agrees = _falls_within(share, next_token(seed + 1, content))
        return (text(seed, content) + (not agrees)) % VOCABULARY

    return draft


def _falls_within(share: float, token: int) -> bool:
    return token < share * VOCABULARY


@dataclass
class Page:
    references: int = 1


@dataclass
class Cache:
    content: list[int]  # what is computed
    pending: list[int]  # known, not computed
    seed: int
    pages: list[Page] = field(default_factory=list)


class FakeExecutor:
    def __init__(self, capacity: Capacity, text: Text = next_token) -> None:
        self.capacity = capacity
        self.text = text
        self.caches: dict[int, Cache] = {}
        self.free = capacity.total_pages
        self.used_ids: set[int] = set()
        self.refuse: dict[int, Code] = {}  # cache id: how to answer its next row

    def restart(self) -> None:
        """All caches are gone."""
        self.caches.clear()
        self.used_ids.clear()
        self.free = self.capacity.total_pages

    def execute(self, plan: PlannedStep) -> StepAnswer:
        for cache_id in plan.releases:
            if (cache := self.caches.pop(cache_id, None)) is not None:
                for page in cache.pages:
                    self._drop(page)
        for cut in plan.truncates:
            self._truncate(cut)
        forks = [self._fork(fork) for fork in plan.forks]
        rows = [self._row(row) for row in plan.rows]
        rows += [self._open(opening) for opening in plan.openings]
        return StepAnswer(plan.number, rows, forks, free_pages=self.free, evictable_pages=0)

    def check(self) -> None:
        """The ledger balances."""
        owned = {id(page) for cache in self.caches.values() for page in cache.pages}
        assert len(owned) + self.free == self.capacity.total_pages

    def _drop(self, page: Page) -> None:
        page.references -= 1
        self.free += page.references == 0

    def _truncate(self, cut: CacheTruncation) -> None:
        if (cache := self.caches.get(cut.cache_id)) is not None and cut.length <= len(cache.content):
            cache.pending = []
            self._shorten(cache, cut.length)

    def _shorten(self, cache: Cache, length: int) -> None:
        """Keep the first `length` tokens, and the pages that they are on."""
        kept = -(-length // self.capacity.page_size)
        for page in cache.pages[kept:]:
            self._drop(page)
        del cache.pages[kept:], cache.content[length:]

    def _fork(self, fork: CacheFork) -> RowAnswer:
        source = self.caches.get(fork.source_id)
        if source is None:
            return RowAnswer(code=Code.NOT_FOUND)
        assert fork.cache_id not in self.used_ids
        assert fork.length <= len(source.content)
        if len(self.caches) >= self.capacity.max_sequences:
            return RowAnswer(code=Code.RESOURCE_EXHAUSTED)
        pages = source.pages[: -(-fork.length // self.capacity.page_size)]
        for page in pages:
            page.references += 1
        content = source.content[: fork.length]
        self.caches[fork.cache_id] = Cache(content, [], fork.sampling.seed, list(pages))
        self.used_ids.add(fork.cache_id)
        return RowAnswer(kv_length=fork.length)

    def _open(self, opening: CacheOpening) -> RowAnswer:
        if opening.cache_id in self.used_ids:
            return RowAnswer(code=Code.ALREADY_EXISTS)
        if len(self.caches) >= self.capacity.max_sequences:
            return RowAnswer(code=Code.RESOURCE_EXHAUSTED)
        self.caches[opening.cache_id] = Cache([], list(opening.tokens), opening.sampling.seed)
        answer = self._feed(opening.cache_id, opening.limit)
        if answer.code:
            del self.caches[opening.cache_id]
        else:
            self.used_ids.add(opening.cache_id)
        return answer

    def _row(self, row: CacheRow) -> RowAnswer:
        cache = self.caches.get(row.cache_id)
        if cache is None:
            return RowAnswer(code=Code.NOT_FOUND, message="unknown cache")
        length = len(cache.content)
        if row.kv_length != length and not (row.is_bound and length < row.kv_length):
            return RowAnswer(code=Code.FAILED_PRECONDITION, message=f"n is {len(cache.content)}")
        if row.tokens:
            cache.pending = list(row.tokens)
        if len(row.drafts) > self.capacity.max_drafts or row.steps > self.capacity.max_steps:
            return RowAnswer(code=Code.INVALID_ARGUMENT, message="too many drafts or steps")
        return self._feed(row.cache_id, row.limit, row.drafts, row.steps)

    def _feed(self, cache_id: int, limit: int, drafts: tuple[int, ...] = (), steps: int = 1) -> RowAnswer:
        if cache_id in self.refuse:
            return RowAnswer(code=self.refuse.pop(cache_id), message="as the test asked")
        cache = self.caches[cache_id]
        page_size = self.capacity.page_size
        fed = cache.pending[: limit or None]
        if not fed:
            return RowAnswer(code=Code.INVALID_ARGUMENT, message="nothing is pending")
        fed += drafts
        start = len(cache.content)
        end = start + len(fed) + steps - 1
        missing = -(-end // page_size) - len(cache.pages)
        tail = start // page_size
        shared = tail < len(cache.pages) and cache.pages[tail].references > 1
        if missing + shared > self.free:
            return RowAnswer(code=Code.RESOURCE_EXHAUSTED, message="no pages")
        if shared:
            cache.pages[tail].references -= 1
            cache.pages[tail] = Page()
        cache.pages += [Page() for _ in range(missing)]
        self.free -= missing + shared
        cache.content += fed
        cache.pending = cache.pending[len(fed) - len(drafts) :]
        tokens = []
        if not cache.pending:
            tokens = self._verify(cache, drafts) if drafts else self._decode(cache, steps)
            cache.pending = tokens[-1:]
        return RowAnswer(kv_length=len(cache.content), tokens=tokens)

    def _decode(self, cache: Cache, steps: int) -> list[int]:
        """Sample `steps` tokens; all but the last are fed back."""
        tokens = [self.text(cache.seed, cache.content)]
        while len(tokens) < steps:
            cache.content.append(tokens[-1])
            tokens.append(self.text(cache.seed, cache.content))
        return tokens

    def _verify(self, cache: Cache, drafts: tuple[int, ...]) -> list[int]:
        """Sample before and after each draft; keep those that are what was sampled in their places."""
        start = len(cache.content) - len(drafts)
        for accepted, draft in enumerate(drafts):
            token = self.text(cache.seed, cache.content[: start + accepted])
            if token != draft:
                self._shorten(cache, start + accepted)
                return [*drafts[:accepted], token]
        return [*drafts, self.text(cache.seed, cache.content)]
