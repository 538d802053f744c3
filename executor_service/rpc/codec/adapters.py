"""Adapters: what LoadAdapter asks for, and how they are shown."""

from __future__ import annotations

import re

from paceline.executor.v1 import executor_pb2 as pb

from executor_service.adapters.registry import LoadedAdapter
from executor_service.adapters.store import AdapterStore
from executor_service.rpc.codec.refusals import refused

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def decode_load(request: pb.LoadAdapterRequest) -> tuple[str, str]:
    """The name and the path of a request. Raises RequestRefused."""
    if _NAME.fullmatch(request.name) is None:
        raise refused(
            "name: 1 to 128 letters, digits, '.', '-' and '_', of which the first is a letter or digit"
        )
    return request.name, request.path or request.name


def encode_adapter(name: str, adapter: LoadedAdapter) -> pb.Adapter:
    """A loaded adapter."""
    return pb.Adapter(
        name=name,
        fingerprint=adapter.fingerprint,
        rank=adapter.rank,
        modules=adapter.modules,
        bytes=adapter.bytes,
        caches=adapter.caches,
        rows=adapter.rows,
        tokens=adapter.tokens,
    )


def encode_adapters(store: AdapterStore) -> list[pb.Adapter]:
    """The loaded adapters, by name. Any thread."""
    named = sorted(store.registry.names.items(), key=lambda item: item[0])
    return [encode_adapter(name, adapter) for name, adapter in named]


def encode_adapter_status(store: AdapterStore) -> pb.AdapterStatus:
    """The counters of adapters and slots, and the loaded adapters. Any thread."""
    registry, slots = store.registry, store.slots
    return pb.AdapterStatus(
        loaded=len(registry.names),
        slots=slots.count,
        used_slots=slots.used,
        bytes=registry.bytes,
        loads=registry.loads,
        unloads=registry.unloads,
        slot_hits=slots.hits,
        slot_loads=slots.loads,
        evictions=slots.evictions,
        adapters=encode_adapters(store),
    )
