"""Decodes an executor's adapters."""

from __future__ import annotations

from paceline.executor.v1 import executor_pb2 as pb

from scheduler_service.model import ServedAdapter

MAX_FINGERPRINT_BYTES = 64


def decode_adapter(message: pb.Adapter, name: str, path: str) -> ServedAdapter:
    """The adapter that was loaded under this name. Raises ValueError if its fingerprint can't be one."""
    if not 1 <= len(message.fingerprint) <= MAX_FINGERPRINT_BYTES:
        raise ValueError(f"an adapter's fingerprint has {len(message.fingerprint)} bytes")
    return ServedAdapter(name, path, message.fingerprint, message.rank, message.bytes)
