"""Truncating: caught by test_truncate.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_service.cache.sequence_store import SequenceStore
from executor_service.cache.session import ClientSession
from tests.conformance.mutants.copy_on_write import reserve_copying_only
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def published_page_overwritten() -> None:
    """a page of the prefix cache is written in place after a truncate into it"""
    reserve_copying_only(lambda cache, page: cache._references[page] > 1)


@mutant()
def off_by_one_truncate() -> None:
    """truncating keeps one token more than asked"""

    def truncate(original: Any, self: SequenceStore, session: ClientSession, op: Any, now_s: float) -> Any:
        sequence = session.caches.get(op.cache_id)
        if sequence is not None and op.length < sequence.length:
            result = original(self, session, replace(op, length=op.length + 1), now_s)
            result.kv_length = op.length
            return result
        return original(self, session, op, now_s)

    wrap(SequenceStore, "_truncate", truncate)


@mutant()
def truncate_frees_nothing() -> None:
    """truncating shortens the cache and keeps its pages"""

    def truncate(original: Any, self: SequenceStore, session: ClientSession, op: Any, now_s: float) -> Any:
        cut, self.pages.cut = self.pages.cut, lambda table, length: None  # type: ignore[method-assign]
        try:
            return original(self, session, op, now_s)
        finally:
            self.pages.cut = cut  # type: ignore[method-assign]

    wrap(SequenceStore, "_truncate", truncate)
