"""What a scheduler says of itself in the directory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler_service.model import ServiceState

MAX_ADDRESS_BYTES = 512
MAX_MODEL_BYTES = 1024
"""Of a model's name, which is any text: that of its files."""
MAX_ADAPTERS, MAX_ADAPTERS_BYTES = 1024, 32 << 10
"""Names, and their bytes together."""
MAX_NAME_BYTES = 256
"""Of an adapter, a TLS name, an instance or a fingerprint."""
MAX_ENTRY_BYTES = 40 << 10
"""Of an entry's message: all of the above, and what it takes to encode them."""


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences and tokens of a scheduler, as the proto's SchedulerLoad."""

    running: int = 0
    waiting: int = 0
    seats: int = 0
    uncomputed_tokens: int = 0
    predicted_wait_ms: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """What a scheduler says of itself, as the proto's SchedulerEntry."""

    address: str
    tls_name: str
    model: str
    model_fingerprint: bytes
    adapters: tuple[str, ...]
    state: ServiceState
    load: Load
    generation: int
    instance: str

    def bounded(self) -> Listing:
        """The listing as others take it: of more adapters than an entry may have, the first ones by name.

        A fingerprint that is too long is left out: no client uses the entry.
        """
        room, adapters = MAX_ADAPTERS_BYTES, []
        for name in sorted(self.adapters)[:MAX_ADAPTERS]:
            if (room := room - len(name.encode())) < 0:
                break
            adapters.append(name)
        model = self.model.encode(errors="replace")[:MAX_MODEL_BYTES].decode(errors="ignore")
        fingerprint = self.model_fingerprint if len(self.model_fingerprint) <= MAX_NAME_BYTES else b""
        return replace(self, model=model, model_fingerprint=fingerprint, adapters=tuple(adapters))
