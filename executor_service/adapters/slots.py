"""`AdapterSlots`: which adapters have their weights on the device, numbered 0 to count - 1. Pure bookkeeping.

A slot is at any time one of
    free   it holds nothing
    idle   it holds an adapter without live caches; given away least recently used first
    used   it holds an adapter of live caches, and keeps it
"""

from __future__ import annotations

from collections import OrderedDict

from executor_service.adapters.registry import LoadedAdapter


class NoFreeSlot(Exception):
    """All slots hold adapters of live caches."""


class AdapterSlots:
    """`count` slots."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[LoadedAdapter, None] = OrderedDict()  # least recently used first
        self.hits = self.loads = self.evictions = 0

    @property
    def used(self) -> int:
        """Number of slots with adapters of live caches."""
        return self.count - len(self._free) - len(self._idle)

    def has_room(self, adapter: LoadedAdapter) -> bool:
        """Whether `hold` would find a slot."""
        return adapter.slot >= 0 or bool(self._free or self._idle)

    def hold(self, adapter: LoadedAdapter) -> bool:
        """Count one more cache. Returns whether the adapter was given a slot, to which its weights must go.

        Raises NoFreeSlot, and then has changed nothing.
        """
        if adapter.slot >= 0:
            if not adapter.caches:
                del self._idle[adapter]
            adapter.caches += 1
            self.hits += 1
            return False
        if self._free:
            adapter.slot = self._free.pop()
        elif self._idle:
            former, _ = self._idle.popitem(last=False)
            adapter.slot, former.slot = former.slot, -1
            self.evictions += 1
        else:
            raise NoFreeSlot
        adapter.caches = 1
        self.loads += 1
        return True

    def drop(self, adapter: LoadedAdapter) -> None:
        """Count one cache less. Without caches the adapter keeps its slot until another one needs it."""
        adapter.caches -= 1
        if not adapter.caches:
            self._idle[adapter] = None

    def clear(self, adapter: LoadedAdapter) -> int:
        """Free the slot of an adapter without caches; returns it, -1 if it had none."""
        slot = adapter.slot
        if slot >= 0:
            del self._idle[adapter]
            self._free.append(slot)
            adapter.slot = -1
        return slot

    def check(self, adapters: list[LoadedAdapter]) -> None:
        """Recount; `adapters` are all that may have slots. Raises AssertionError."""
        taken = sorted([adapter.slot for adapter in adapters if adapter.slot >= 0] + self._free)
        if taken != list(range(self.count)):
            raise AssertionError(f"slots {taken} of adapters and free ones are not 0 to {self.count - 1}")
        for adapter in adapters:
            if (adapter.caches == 0 and adapter.slot >= 0) != (adapter in self._idle):
                raise AssertionError(f"the slot of an adapter with {adapter.caches} caches is wrongly idle")
            if adapter.caches and adapter.slot < 0:
                raise AssertionError(f"an adapter with {adapter.caches} caches has no slot")
