"""A small executor for the core's tests, written from executor.proto's comments: pages and exact contents.

It samples a hash of all cached content and the seed, so a wrong length, fork or re-opening gives
another token at once. It has no prefix cache; its ledger is a reference count per page.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_service.core.step import (
    CacheFork,
    CacheOpening,
    CacheRow,
    Capacity,
    Code,
    PlannedStep,
    RowAnswer,
    StepAnswer,
)

VOCABULARY = 1000


def next_token(seed: int, content: list[int]) -> int:
    """What follows `content` under `seed`."""
    value = seed + 1
    for token in content:
        value = (value * 6364136223846793005 + token + 1442695040888963407) % (1 << 64)
    return (value >> 33) % VOCABULARY


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
    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
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
        if row.kv_length != len(cache.content):
            return RowAnswer(code=Code.FAILED_PRECONDITION, message=f"n is {len(cache.content)}")
        if row.tokens:
            cache.pending = list(row.tokens)
        return self._feed(row.cache_id, row.limit)

    def _feed(self, cache_id: int, limit: int) -> RowAnswer:
        if cache_id in self.refuse:
            return RowAnswer(code=self.refuse.pop(cache_id), message="as the test asked")
        cache = self.caches[cache_id]
        page_size = self.capacity.page_size
        fed = cache.pending[: limit or None]
        if not fed:
            return RowAnswer(code=Code.INVALID_ARGUMENT, message="nothing is pending")
        start, end = len(cache.content), len(cache.content) + len(fed)
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
        cache.pending = cache.pending[len(fed) :]
        tokens = []
        if not cache.pending:
            tokens = [next_token(cache.seed, cache.content)]
            cache.pending = list(tokens)
        return RowAnswer(kv_length=len(cache.content), tokens=tokens)
