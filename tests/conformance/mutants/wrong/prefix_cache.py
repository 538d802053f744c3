"""The prefix cache: which pages are shared, and with whom: caught by test_prefix_cache.py."""

from __future__ import annotations

from typing import Any

from executor_service.cache.kv_cache import KvCache
from executor_service.steps.commit import StepCommit
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def page_published_before_it_is_full() -> None:
    """a page enters the prefix cache when its tokens are known, not when they are stored"""
    wrap(StepCommit, "_finish", _finish_publishing_known)


def _finish_publishing_known(
    original: Any, self: StepCommit, row: Any, length: int, known: int, output: Any
) -> None:
    original(self, row, length, known, output)
    table, page_size = row.sequence.table, self._pages.page_size
    if row.outputs and min(known // page_size, table.count) > len(table.hashes):
        self._pages.publish(table, row.sequence.ids, min(known, table.count * page_size))


@mutant()
def salt_ignored() -> None:
    """prefixes are shared across salts"""
    wrap(KvCache, "open", lambda original, self, salt, *rest: original(self, b"", *rest))


@mutant()
def hash_without_its_past() -> None:
    """a page is known by its own tokens alone, whatever came before it"""
    wrap(KvCache, "_chain", lambda original, self, parent, tokens, index: original(self, b"", tokens, index))


@mutant()
def hash_misses_a_token() -> None:
    """the last token of a page is left out of its hash"""

    def chain(original: Any, self: KvCache, parent: bytes, tokens: Any, index: int) -> bytes:
        masked = tokens.copy()
        masked[self.page_size - 1 :: self.page_size] = 0
        digest: bytes = original(self, parent, masked, index)
        return digest

    wrap(KvCache, "_chain", chain)
