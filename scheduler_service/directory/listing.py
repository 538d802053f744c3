"""What a scheduler says of itself in the directory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler_service.model import ServiceState

MAX_ADDRESS_BYTES = 512
MAX_ADAPTERS = 1024
MAX_NAME_BYTES = 256
"""Of a model, an adapter, a TLS name or an instance."""


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

    def settled(self) -> Listing:
        """The listing without its load, which changes all the time."""
        return replace(self, load=Load())
