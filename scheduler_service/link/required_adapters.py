"""`WantedAdapters`: the adapters that executors must have: requests may name them, or still use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from scheduler_service.model import ServedAdapter


class WantedAdapters:
    """By name. An unloaded adapter is *leaving* until no live request uses it. Event loop only."""

    def __init__(self, from_start: Mapping[str, str] | None = None) -> None:
        """`from_start`: paths by name, of adapters that the first executor to have them describes."""
        self.from_start = dict(from_start or {})
        self._served: dict[str, ServedAdapter] = {}
        self._leaving: dict[str, ServedAdapter] = {}
        self.requests: Counter[str] = Counter()  # that were taken, of each served name since it was loaded
        self.version = 0  # rises when an adapter is added
        self.loads = self.unloads = 0  # names, since the start

    @property
    def served(self) -> Sequence[ServedAdapter]:
        """Those that requests may name, by name."""
        return [self._served[name] for name in sorted(self._served)]

    @property
    def needed(self) -> Sequence[ServedAdapter]:
        """Those that every executor must have: also leaving ones, whose requests may fail over."""
        return [*self._served.values(), *self._leaving.values()]

    def find(self, name: str) -> ServedAdapter | None:
        """The adapter that requests mean by this name."""
        return self._served.get(name)

    def is_leaving(self, name: str) -> bool:
        """Whether live requests use an adapter that was unloaded under this name."""
        return name in self._leaving

    def is_served(self, fingerprint: bytes) -> bool:
        """Whether requests may name an adapter of this content."""
        return any(adapter.fingerprint == fingerprint for adapter in self._served.values())

    def add(self, adapter: ServedAdapter) -> None:
        """Let requests name an adapter, which all executors have; no change if they may already."""
        self.from_start.pop(adapter.name, None)
        if adapter.name not in self._served:
            self._served[adapter.name] = adapter
            self.version += 1
            self.loads += 1

    def count(self, adapter: ServedAdapter | None) -> None:
        """Count a request that was taken, if it names an adapter."""
        if adapter is not None:
            self.requests[adapter.name] += 1

    def leave(self, name: str) -> ServedAdapter | None:
        """No further request may name it. Returns the adapter; None: there is none of this name."""
        adapter = self._served.pop(name, None)
        if adapter is not None:
            self._leaving[name] = adapter
            del self.requests[name]
            self.unloads += 1
        return adapter

    def forget(self, name: str) -> None:
        """No live request uses a leaving adapter any more."""
        del self._leaving[name]
