"""Rows that go on with a cache: caught by test_decode.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_service.cache.sequence import CachedSequence
from executor_service.steps.reservation import RowReservation
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def truncate_keeps_what_is_pending() -> None:
    """after a truncate the old next token is still fed"""

    def forget(original: Any, self: CachedSequence, length: int) -> None:
        known = self.known
        original(self, length)
        self.known = min(length + 1, known)
        self.sampled = self.known > length

    wrap(CachedSequence, "forget_pending", forget)


@mutant()
def kv_length_ignored() -> None:
    """a row is computed whatever KV length it expects"""

    def proceed(original: Any, self: RowReservation, index: int, row: Any) -> Any:
        sequence = self._session.caches.get(row.cache_id)
        return original(self, index, row if sequence is None else replace(row, kv_length=sequence.length))

    wrap(RowReservation, "_continue", proceed)
