"""Pages: what is free, owned and cached, and whose content a page holds: caught by test_pages.py."""

from __future__ import annotations

from typing import Any

from executor_service.cache.kv_cache import KvCache, OutOfPages
from executor_service.cache.sequence_store import SequenceStore
from executor_service.cache.session import ClientSession
from executor_service.steps.reservation import RowReservation
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def stale_page() -> None:
    """an evicted page stays known to the prefix cache, which hands it out with another's content"""

    def new(self: KvCache) -> int:
        page = self._free.pop() if self._free else self._cached.popitem(last=False)[0]
        self._references[page] = 1
        return page

    KvCache._new = new  # type: ignore[method-assign]


@mutant()
def reservation_by_halves() -> None:
    """a reservation that fails keeps the pages it got so far"""

    def reserve(original: Any, self: KvCache, table: Any, start: int, end: int) -> Any:
        try:
            return original(self, table, start, end)
        except OutOfPages as error:
            for _ in range(error.available):
                table.append(self._new())
            raise

    wrap(KvCache, "reserve", reserve)
    wrap(RowReservation, "_open", _without_undo)


def _without_undo(original: Any, self: RowReservation, index: int, opening: Any) -> Any:
    cut, self._pages.cut = self._pages.cut, lambda table, length: None  # type: ignore[method-assign]
    try:
        return original(self, index, opening)
    finally:
        self._pages.cut = cut  # type: ignore[method-assign]


@mutant()
def released_pages_lost() -> None:
    """releasing a cache forgets it and keeps its last page"""

    def release(original: Any, self: SequenceStore, session: ClientSession, cache_id: int) -> bool:
        if (sequence := session.caches.get(cache_id)) is not None and sequence.table.count:
            self.pages._take(sequence.table.at(sequence.table.count - 1))
        known: bool = original(self, session, cache_id)
        return known

    wrap(SequenceStore, "_release", release)
