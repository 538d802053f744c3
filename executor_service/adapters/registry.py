"""`AdapterRegistry`: loaded adapters by name, and unloaded ones that caches still use. Pure bookkeeping."""

from __future__ import annotations

from typing import Any

from executor_service.adapters.weights import AdapterWeights
from executor_service.contract.plan import Reason, RequestRefused


class LoadedAdapter:
    """One adapter: equal content has one, however many names it has. Changed by the device thread only."""

    __slots__ = (
        "bytes", "caches", "fingerprint", "modules", "names", "prepared", "rank", "rows", "slot", "tokens",
    )  # fmt: skip

    def __init__(self, weights: AdapterWeights, prepared: Any, held: int | None = None) -> None:
        """`prepared`: what a backend made of the weights, for its slots; `held`: bytes of it, if others."""
        self.fingerprint, self.rank, self.modules = weights.fingerprint, weights.rank, weights.modules
        self.bytes, self.prepared = weights.bytes if held is None else held, prepared
        self.names: set[str] = set()  # empty: unloaded, but caches still use it
        self.slot = -1  # on the device; -1: none
        self.caches = 0  # live ones that use it; at least 1: it has a slot, and keeps it
        self.rows = self.tokens = 0  # computed with it


class AdapterRegistry:
    """At most `max_adapters` names, and `max_bytes` of weights, those of unloaded adapters included."""

    def __init__(self, max_adapters: int, max_bytes: int) -> None:
        self.max_adapters, self.max_bytes = max_adapters, max_bytes
        self.names: dict[str, LoadedAdapter] = {}
        self.adapters: dict[bytes, LoadedAdapter] = {}  # by fingerprint
        self.bytes = self.loads = self.unloads = 0

    def find(self, fingerprint: bytes) -> LoadedAdapter | None:
        """The loaded adapter of this fingerprint; None: it is not loaded, or has been unloaded."""
        adapter = self.adapters.get(fingerprint)
        return adapter if adapter is not None and adapter.names else None

    def check_room(self, name: str, size: int) -> None:
        """Whether an adapter of `size` bytes may be read for this name. Raises RequestRefused.

        For a name that is taken the size tells whether the content can be the same.
        """
        if (known := self.names.get(name)) is not None:
            if known.bytes != size:
                raise self._taken(name)
            return
        if len(self.names) >= self.max_adapters:
            raise RequestRefused(
                Reason.ADAPTER_MEMORY, f"{self.max_adapters} adapters are loaded (max_adapters); unload one"
            )
        if self.bytes + size > self.max_bytes:
            raise RequestRefused(
                Reason.ADAPTER_MEMORY,
                f"the adapter has {size} bytes, {self.max_bytes - self.bytes} of {self.max_bytes} "
                "(max_adapter_bytes) are left",
            )

    def add(self, name: str, adapter: LoadedAdapter) -> LoadedAdapter:
        """Load an adapter under a name; returns the one of this content. Raises RequestRefused."""
        if (named := self.names.get(name)) is not None:
            if named.fingerprint != adapter.fingerprint:
                raise self._taken(name)
            return named
        known = self.adapters.get(adapter.fingerprint)
        self.check_room(name, 0 if known is not None else adapter.bytes)
        if known is None:
            known = self.adapters[adapter.fingerprint] = adapter
            self.bytes += adapter.bytes
        known.names.add(name)
        self.names[name] = known
        self.loads += 1
        return known

    def remove(self, name: str) -> LoadedAdapter | None:
        """Unload a name. Returns its adapter, if it had one; that stays until it is forgotten."""
        if (adapter := self.names.pop(name, None)) is not None:
            adapter.names.remove(name)
            self.unloads += 1
        return adapter

    def forget(self, adapter: LoadedAdapter) -> None:
        """Let go of an adapter without names and caches."""
        del self.adapters[adapter.fingerprint]
        self.bytes -= adapter.bytes

    @staticmethod
    def _taken(name: str) -> RequestRefused:
        return RequestRefused(
            Reason.ADAPTER_NAME, f"name: {name} is loaded with other content; unload it first"
        )
