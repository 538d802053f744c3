"""`Savepoint`: restores what a step's ops changed, if the step is abandoned while it is computed.

`StepRows.undo` comes first, and undoes what the step's rows changed. The savepoint restores the rest:
sequences that ops released, truncated or forked, and pages that rows replaced by copies. It holds references
to these pages, so that they are neither reused nor written, and holds on the sequences' adapters, so that
these keep their slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from executor_service.cache.block_table import BlockTable
from executor_service.cache.kv_cache import KvCache
from executor_service.cache.sequence import CachedSequence, HiddenSum
from executor_service.cache.sequence_store import SequenceStore
from executor_service.cache.session import ClientSession
from executor_service.contract.plan import Refusal, Release, StepPlan, TokenIds, Truncate


class _Saved(NamedTuple):
    sequence: CachedSequence
    table: BlockTable
    ids: TokenIds
    length: int
    known: int
    sampled: bool
    hidden_sum: HiddenSum | None
    scored: range


class Savepoint:
    """A session's caches before a step. Ended by `discard` or `restore`, once; no step is in flight."""

    def __init__(self, session: ClientSession, plan: StepPlan, store: SequenceStore) -> None:
        self._session, self._store, self._pages = session, store, store.pages
        self._count = store.count
        self._caches = dict(session.caches) if plan.ops else None
        self._released = session.released_ids() if plan.ops else None
        self._saved = [self._save(sequence) for sequence in _changed(session, plan, store.pages)]

    @property
    def holds_pages(self) -> bool:
        """Whether it holds pages, and slots of adapters, that would be available without it."""
        return bool(self._saved)

    def discard(self) -> None:
        """Release the held pages: the step is done, or cannot be abandoned any more."""
        for saved in self._saved:
            self._pages.cut(saved.table, 0)
            self._store.adapters.drop(saved.sequence.adapter)
        self._saved = []

    def restore(self) -> None:
        """Restore all caches of the session; the step's rows have been undone."""
        session, pages, adapters = self._session, self._pages, self._store.adapters
        if self._caches is not None and self._released is not None:
            for cache_id in session.caches.keys() - self._caches.keys():  # forks
                pages.cut(session.caches[cache_id].table, 0)
                adapters.drop(session.caches[cache_id].adapter)
            for cache_id in self._caches.keys() - session.caches.keys():  # released
                adapters.share(self._caches[cache_id].adapter)
            session.caches.clear()
            session.caches.update(self._caches)
            session.restore_released(self._released)
            self._store.count = self._count
        for saved in self._saved:
            sequence = saved.sequence
            pages.cut(sequence.table, 0)
            sequence.table, sequence.ids = saved.table, saved.ids
            sequence.length, sequence.known, sequence.sampled = saved.length, saved.known, saved.sampled
            adapters.drop(sequence.adapter)
            sequence.hidden_sum, sequence.scored = saved.hidden_sum, saved.scored
        self._saved = []

    def _save(self, sequence: CachedSequence) -> _Saved:
        table = sequence.table
        whole = self._pages.fork(table, table.count * self._pages.page_size)
        ids = sequence.ids[: sequence.known].copy()
        self._store.adapters.share(sequence.adapter)
        return _Saved(
            sequence, whole, ids, sequence.length, sequence.known, sequence.sampled, sequence.hidden_sum,
            sequence.scored,
        )  # fmt: skip


def _changed(session: ClientSession, plan: StepPlan, pages: KvCache) -> Iterator[CachedSequence]:
    """The sequences whose pages the step's ops release, or of which a row replaces a page by a copy."""
    ids: dict[int, None] = {}
    for op in plan.ops:
        if isinstance(op, Release):
            ids |= dict.fromkeys(op.cache_ids)
        elif isinstance(op, Truncate):
            ids[op.cache_id] = None
    for row in plan.rows:
        if isinstance(row, Refusal) or (sequence := session.caches.get(row.cache_id)) is None:
            continue
        if pages.must_copy(sequence.table, sequence.length):
            ids[row.cache_id] = None
    return (session.caches[cache_id] for cache_id in ids if cache_id in session.caches)
