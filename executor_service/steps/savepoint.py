"""`Savepoint`: the way back from a step that is given up while it is computed.

What rows did is undone by their batch. This holds the rest: what ops released, cut and forked, and the pages
that rows replaced by copies. Pages are held by references of its own, so that nobody writes to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from executor_service.cache.kv_cache import BlockTable, KvCache
from executor_service.cache.sequence import Sequence
from executor_service.cache.session import Session
from executor_service.contract.plan import Refusal, Release, StepPlan, TokenIds, Truncate


class _Saved(NamedTuple):
    sequence: Sequence
    table: BlockTable
    ids: TokenIds
    length: int
    known: int
    sampled: bool


class Savepoint:
    """A session's caches before a step. Ended by `discard` or `restore`, once; nothing is under way."""

    def __init__(self, session: Session, plan: StepPlan, cache: KvCache) -> None:
        self._session, self._cache = session, cache
        self._caches = dict(session.caches) if plan.ops else None
        self._released = session.released_ids() if plan.ops else None
        self._saved = [self._save(sequence) for sequence in _changed(session, plan, cache)]

    @property
    def holds_pages(self) -> bool:
        """Whether there are pages that others could have without it."""
        return bool(self._saved)

    def discard(self) -> None:
        """Let go of what is held: what was done is done."""
        for saved in self._saved:
            self._cache.cut(saved.table, 0)
        self._saved = []

    def restore(self) -> None:
        """Make all caches of the session what they were; the step's rows were undone before."""
        session, cache = self._session, self._cache
        if self._caches is not None and self._released is not None:
            for cache_id in session.caches.keys() - self._caches.keys():  # forks
                cache.cut(session.caches[cache_id].table, 0)
            session.caches.clear()
            session.caches.update(self._caches)
            session.restore_released(self._released)
        for saved in self._saved:
            sequence = saved.sequence
            cache.cut(sequence.table, 0)
            sequence.table, sequence.ids = saved.table, saved.ids
            sequence.length, sequence.known, sequence.sampled = saved.length, saved.known, saved.sampled
        self._saved = []

    def _save(self, sequence: Sequence) -> _Saved:
        table = sequence.table
        whole = self._cache.fork(table, table.count * self._cache.page_size)
        ids = sequence.ids[: sequence.known].copy()
        return _Saved(sequence, whole, ids, sequence.length, sequence.known, sequence.sampled)


def _changed(session: Session, plan: StepPlan, cache: KvCache) -> Iterator[Sequence]:
    """The sequences that lose a page to the step's ops, or to the copies that its rows write to."""
    ids: dict[int, None] = {}
    for op in plan.ops:
        if isinstance(op, Release):
            ids |= dict.fromkeys(op.cache_ids)
        elif isinstance(op, Truncate):
            ids[op.cache_id] = None
    for row in plan.rows:
        if isinstance(row, Refusal) or (sequence := session.caches.get(row.cache_id)) is None:
            continue
        if cache.must_copy(sequence.table, sequence.length):
            ids[row.cache_id] = None
    return (session.caches[cache_id] for cache_id in ids if cache_id in session.caches)
