"""Adapters: caught by test_adapters.py."""

from __future__ import annotations

from typing import Any

from executor_service.adapters.slots import AdapterSlots, NoFreeSlot
from executor_service.adapters.store import AdapterStore
from executor_service.backends.oracle_backend.oracle import OracleBackend
from executor_service.cache.kv_cache import KvCache
from executor_service.cache.sequence_store import SequenceStore
from executor_service.cache.session import ClientSession
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def adapters_share_pages() -> None:
    """a prompt finds pages that were computed with another adapter"""
    wrap(KvCache, "open", lambda original, self, salt, tokens, adapter=b"": original(self, salt, tokens))


@mutant()
def rows_with_their_neighbours_adapter() -> None:
    """the slots of a batch are one row off"""

    def forward(original: Any, self: OracleBackend, rows: Any) -> Any:
        slots = [row.slot for row in rows]
        for row, slot in zip(rows, [*slots[1:], *slots[:1]], strict=True):
            row.slot = slot
        return original(self, rows)

    wrap(OracleBackend, "forward", forward)


@mutant()
def unloaded_under_a_running_row() -> None:
    """an unloaded adapter's slot is given to the next one that needs one, whoever still uses it"""

    unloaded: set[Any] = set()

    def remove(original: Any, self: AdapterStore, name: str) -> bool:
        adapter = self.registry.names.get(name)
        removed: bool = original(self, name)
        if adapter is not None and adapter.caches:
            unloaded.add(adapter)
            self.slots._free.append(adapter.slot)
        return removed

    def clear(original: Any, self: AdapterSlots, adapter: Any) -> int:
        slot: int = original(self, adapter)
        if adapter in unloaded:  # the slot is free already, or another's
            self._free.remove(slot)
            return -1
        return slot

    wrap(AdapterSlots, "clear", clear)
    wrap(AdapterStore, "remove", remove)


@mutant()
def fork_loses_its_adapter() -> None:
    """a fork is computed with the model as it is"""

    def fork(original: Any, self: SequenceStore, session: ClientSession, op: Any, now_s: float) -> Any:
        result = original(self, session, op, now_s)
        if result.refusal is None:
            copy = session.caches[op.cache_id]
            self.adapters.drop(copy.adapter)
            copy.adapter = None
        return result

    wrap(SequenceStore, "_fork", fork)


@mutant()
def slot_not_released_with_its_cache() -> None:
    """a released cache goes on holding its adapter's slot"""

    def release(original: Any, self: SequenceStore, session: ClientSession, cache_id: int) -> bool:
        if (sequence := session.caches.get(cache_id)) is not None:
            self.adapters.share(sequence.adapter)
        released: bool = original(self, session, cache_id)
        return released

    wrap(SequenceStore, "_release", release)


@mutant()
def slot_taken_from_live_caches() -> None:
    """where no slot is free, an adapter gets one that is in use"""
    thieves: set[Any] = set()

    def hold(original: Any, self: AdapterSlots, adapter: Any) -> bool:
        try:
            loaded: bool = original(self, adapter)
        except NoFreeSlot:
            adapter.slot, adapter.caches = 0, 1
            thieves.add(adapter)
            return True
        return loaded

    def clear(original: Any, self: AdapterSlots, adapter: Any) -> int:
        slot: int = original(self, adapter)
        if adapter in thieves:  # or else the slot would be unloaded twice
            self._free.remove(slot)
            return -1
        return slot

    wrap(AdapterSlots, "hold", hold)
    wrap(AdapterSlots, "clear", clear)
    wrap(AdapterSlots, "has_room", lambda original, self, adapter: True)
