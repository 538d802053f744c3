"""Listings to and from the proto's SchedulerEntry."""

from __future__ import annotations

from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.directory.directory import Entry
from scheduler_service.directory.listing import (
    MAX_ADAPTERS,
    MAX_ADAPTERS_BYTES,
    MAX_ADDRESS_BYTES,
    MAX_MODEL_BYTES,
    MAX_NAME_BYTES,
    Listing,
    Load,
)
from scheduler_service.directory.places import one_spelling
from scheduler_service.errors import invalid
from scheduler_service.model import ServiceState

_STATES = {pb.SchedulerState.Value(f"SCHEDULER_STATE_{state.name}"): state for state in ServiceState}
_NUMBERS = {state: number for number, state in _STATES.items()}


def add_entry(message: pb.WatchSchedulersResponse, entry: Entry, now: float) -> int:
    """Add an entry to a message, with who wrote it, and how long ago; returns its size in bytes."""
    if entry.encoded is None:  # once, for all watchers
        entry.encoded = encoded_listing(entry.listing)
        entry.encoded.written_by = entry.writer
    added = message.entries.add()
    added.CopyFrom(entry.encoded)
    added.age_ms = min(int(max(now - entry.written_at, 0.0) * 1000), (1 << 32) - 1)
    return added.ByteSize()


def encoded_listing(listing: Listing) -> pb.SchedulerEntry:
    """The message of a listing."""
    return pb.SchedulerEntry(
        address=listing.address,
        tls_name=listing.tls_name,
        model=listing.model,
        model_fingerprint=listing.model_fingerprint,
        adapters=listing.adapters,
        state=_NUMBERS[listing.state],
        load=pb.SchedulerLoad(
            running=listing.load.running,
            waiting=listing.load.waiting,
            seats=listing.load.seats,
            uncomputed_tokens=listing.load.uncomputed_tokens,
            predicted_wait_ms=listing.load.predicted_wait_ms,
        ),
        generation=listing.generation,
        instance=listing.instance,
    )


def decode_entry(entry: pb.SchedulerEntry) -> Listing:
    """The listing in a message. Raises ServiceError, with the field, for what is missing or too large."""
    _check_text("entry.address", entry.address, MAX_ADDRESS_BYTES)
    try:
        address = one_spelling(entry.address)
    except ValueError as error:
        raise invalid("entry.address", str(error)) from None
    _check_text("entry.tls_name", entry.tls_name, MAX_NAME_BYTES, empty=True)
    if len(entry.model.encode()) > MAX_MODEL_BYTES:
        raise invalid("entry.model", f"has more than {MAX_MODEL_BYTES} bytes")
    _check_text("entry.instance", entry.instance, MAX_NAME_BYTES)
    if len(entry.model_fingerprint) > MAX_NAME_BYTES:
        raise invalid("entry.model_fingerprint", f"has more than {MAX_NAME_BYTES} bytes")
    if len(entry.adapters) > MAX_ADAPTERS:
        raise invalid("entry.adapters", f"has more than {MAX_ADAPTERS} names")
    if sum(len(name.encode()) for name in entry.adapters) > MAX_ADAPTERS_BYTES:
        raise invalid("entry.adapters", f"has names of more than {MAX_ADAPTERS_BYTES} bytes together")
    for name in entry.adapters:
        _check_text("entry.adapters", name, MAX_NAME_BYTES)
    if not entry.generation:
        raise invalid("entry.generation", "is missing")
    load = entry.load
    return Listing(
        address=address,
        tls_name=entry.tls_name,
        model=entry.model,
        model_fingerprint=entry.model_fingerprint,
        adapters=tuple(entry.adapters),
        # A state that a newer scheduler has, and this one does not know, is none that gets new streams.
        state=_STATES.get(entry.state, ServiceState.NO_EXECUTOR),
        load=Load(load.running, load.waiting, load.seats, load.uncomputed_tokens, load.predicted_wait_ms),
        generation=entry.generation,
        instance=entry.instance,
    )


def _check_text(field: str, text: str, limit: int, *, empty: bool = False) -> None:
    if not text and not empty:
        raise invalid(field, "is missing")
    if len(text.encode()) > limit:
        raise invalid(field, f"has more than {limit} bytes")
    if not text.isprintable() or " " in text:
        raise invalid(field, "has spaces or control characters")
