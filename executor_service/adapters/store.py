"""`AdapterStore`: the adapters of one engine, their slots, and the device that has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

from executor_service.adapters.registry import AdapterRegistry, LoadedAdapter
from executor_service.adapters.slots import AdapterSlots


class SlotDevice(Protocol):
    """A device with slots for adapters. Both calls are ordered after all earlier launches."""

    def load_adapter(self, slot: int, prepared: Any) -> None:
        """Bring an adapter to a slot; what was in it is not needed any more."""

    def unload_adapter(self, slot: int) -> None:
        """Forget what is in a slot."""


class AdapterStore:
    """All methods: device thread. Counts may be read by any thread.

    Each sequence with an adapter has one hold on it, from `hold` or `share` to `drop`. None stands for no
    adapter, wherever an adapter is expected.
    """

    def __init__(self, registry: AdapterRegistry, slots: AdapterSlots, device: SlotDevice | None) -> None:
        self.registry, self.slots, self._device = registry, slots, device

    def find(self, fingerprint: bytes) -> LoadedAdapter | None:
        """The loaded adapter of this fingerprint."""
        return self.registry.find(fingerprint)

    def add(self, name: str, adapter: LoadedAdapter) -> LoadedAdapter:
        """Load an adapter under a name; returns the one of this content. Raises RequestRefused."""
        return self.registry.add(name, adapter)

    def remove(self, name: str) -> bool:
        """Unload a name; returns whether it was loaded. Sequences go on with the adapter that they have."""
        adapter = self.registry.remove(name)
        if adapter is not None:
            self._forget_unused(adapter)
        return adapter is not None

    def has_room(self, adapter: LoadedAdapter | None) -> bool:
        """Whether a new sequence may have the adapter: it has a slot, or can be given one."""
        return adapter is None or self.slots.has_room(adapter)

    def hold(self, adapter: LoadedAdapter | None) -> None:
        """Hold an adapter for a new sequence, in a slot. Raises NoFreeSlot unless it has room."""
        if adapter is not None and self.slots.hold(adapter):
            assert self._device is not None
            self._device.load_adapter(adapter.slot, adapter.prepared)

    def share(self, adapter: LoadedAdapter | None) -> None:
        """Hold an adapter once more that is held already."""
        if adapter is not None:
            adapter.caches += 1

    def drop(self, adapter: LoadedAdapter | None) -> None:
        """End a hold."""
        if adapter is not None:
            self.slots.drop(adapter)
            self._forget_unused(adapter)

    def check(self, used: Iterable[LoadedAdapter | None]) -> None:
        """Recount; `used`: the adapter of each sequence. Raises AssertionError at the first difference."""
        counted = Counter(adapter for adapter in used if adapter is not None)
        adapters = list(self.registry.adapters.values())
        for adapter in adapters:
            if adapter.caches != counted.pop(adapter, 0):
                raise AssertionError(f"{adapter.caches} caches of an adapter are counted, which is wrong")
            if not adapter.names and not adapter.caches:
                raise AssertionError("an adapter is kept that has neither names nor caches")
        if counted:
            raise AssertionError("sequences use an adapter that was forgotten")
        if self.registry.bytes != sum(adapter.bytes for adapter in adapters):
            raise AssertionError("the bytes of adapters are wrongly counted")
        self.slots.check(adapters)

    def _forget_unused(self, adapter: LoadedAdapter) -> None:
        """Let go of an adapter that has been unloaded and that no sequence uses."""
        if adapter.names or adapter.caches:
            return
        if (slot := self.slots.clear(adapter)) >= 0:
            assert self._device is not None
            self._device.unload_adapter(slot)
        self.registry.forget(adapter)


def no_adapters() -> AdapterStore:
    """The store of an engine whose backend has no adapters, or may not load any."""
    return AdapterStore(AdapterRegistry(0, 0), AdapterSlots(0), None)
