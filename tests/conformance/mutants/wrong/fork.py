"""Forking: caught by test_fork.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_service.cache.sequence_store import SequenceStore
from executor_service.cache.session import ClientSession
from tests.conformance.mutants.copy_on_write import reserve_copying_only
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def copy_on_write_omitted() -> None:
    """a fork and its source write into the same partial page"""
    reserve_copying_only(lambda cache, page: cache._references[page] == 1 and page in cache._hash_of)


@mutant()
def fork_with_its_sources_sampling() -> None:
    """a fork samples under its source's seed and rules"""

    def fork(original: Any, self: SequenceStore, session: ClientSession, op: Any, now_s: float) -> Any:
        source = session.caches.get(op.source_id)
        sampling = op.sampling if source is None else source.sampling
        return original(self, session, replace(op, sampling=sampling), now_s)

    wrap(SequenceStore, "_fork", fork)
