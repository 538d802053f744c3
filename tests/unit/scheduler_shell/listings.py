"""Listings of schedulers for the tests of the directory."""

from __future__ import annotations

from dataclasses import replace

from scheduler_service.directory.listing import Listing, Load
from scheduler_service.model import ServiceState

LISTING = Listing(
    address="10.0.0.1:50051",
    tls_name="",
    model="tiny",
    model_fingerprint=b"print",
    adapters=("sql",),
    state=ServiceState.SERVING,
    load=Load(running=3, waiting=1, seats=8, uncomputed_tokens=70, predicted_wait_ms=5),
    generation=7,
    instance="drawn",
)


def listing(number: int, generation: int = 7) -> Listing:
    return replace(
        LISTING, address=f"10.0.0.{number}:50051", instance=f"drawn {number}", generation=generation
    )
