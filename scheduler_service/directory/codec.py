"""Listings to and from the proto's SchedulerEntry."""

from __future__ import annotations

from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.directory.directory import Entry
from scheduler_service.directory.listing import MAX_ADAPTERS, MAX_ADDRESS_BYTES, MAX_NAME_BYTES, Listing, Load
from scheduler_service.directory.places import one_spelling
from scheduler_service.errors import invalid
from scheduler_service.model import ServiceState

_STATES = {pb.SchedulerState.Value(f"SCHEDULER_STATE_{state.name}"): state for state in ServiceState}
_NUMBERS = {state: number for number, state in _STATES.items()}


def encode_entry(entry: Entry, now: float) -> pb.SchedulerEntry:
    """The message of an entry, with who wrote it, and how long ago."""
    listing = entry.listing
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
        written_by=entry.writer,
        age_ms=min(int(max(now - entry.written_at, 0.0) * 1000), (1 << 32) - 1),
    )


def decode_entry(entry: pb.SchedulerEntry) -> Listing:
    """The listing in a message. Raises ServiceError, with the field, for what is missing or too large."""
    _check_text("entry.address", entry.address, MAX_ADDRESS_BYTES)
    try:
        address = one_spelling(entry.address)
    except ValueError as error:
        raise invalid("entry.address", str(error)) from None
    _check_text("entry.tls_name", entry.tls_name, MAX_NAME_BYTES, empty=True)
    _check_text("entry.model", entry.model, MAX_NAME_BYTES, empty=True)
    _check_text("entry.instance", entry.instance, MAX_NAME_BYTES)
    if len(entry.model_fingerprint) > MAX_NAME_BYTES:
        raise invalid("entry.model_fingerprint", f"has more than {MAX_NAME_BYTES} bytes")
    if len(entry.adapters) > MAX_ADAPTERS:
        raise invalid("entry.adapters", f"has more than {MAX_ADAPTERS} names")
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
