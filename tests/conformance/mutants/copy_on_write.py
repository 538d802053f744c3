"""Copy on write, but only of some of the pages that have to be copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from executor_service.cache.kv_cache import KvCache
from tests.conformance.mutants.registry import wrap


def reserve_copying_only(must_copy: Callable[[KvCache, int], bool]) -> None:
    """Reservations copy a page before it is written only where must_copy(cache, page)."""

    def reserve(original: Any, self: KvCache, table: Any, start: int, end: int) -> Any:
        index = start // self.page_size
        if index < table.count and start < end and not must_copy(self, table.at(index)):
            start = min(end, (index + 1) * self.page_size)  # the page it is in is taken as it is
        return original(self, table, start, end)

    wrap(KvCache, "reserve", reserve)
