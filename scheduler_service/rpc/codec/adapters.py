"""Adapters: which one a request names, what administrators load, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from paceline.scheduler.v1 import admin_pb2
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.core.snapshot import AdapterUse
from scheduler_service.errors import ErrorReason, ServiceError, invalid, unsupported
from scheduler_service.model import ADAPTER_NAME_RULE, ServedAdapter, ServedModel, is_adapter_name
from scheduler_service.rpc.codec.checks import check_size

MAX_PATH_BYTES = 1024
_MAX_NAMED = 16  # adapters in the message of a refusal


class AdapterNames(Protocol):
    """The adapters that requests may name."""

    @property
    def served(self) -> Sequence[ServedAdapter]:
        """All of them, by name."""

    def find(self, name: str) -> ServedAdapter | None:
        """The one of this name."""


class NoAdapterNames:
    """There are none."""

    served: Sequence[ServedAdapter] = ()

    def find(self, name: str) -> ServedAdapter | None:
        """None."""


NO_ADAPTERS = NoAdapterNames()


def find_adapter(name: str, model: ServedModel, adapters: AdapterNames) -> ServedAdapter | None:
    """The adapter that the field `model` of a request names; None: it names the model, or is empty.

    Raises ServiceError.
    """
    if name in ("", model.name):
        return None
    if (adapter := adapters.find(name)) is not None:
        return adapter
    names = [one.name for one in adapters.served]
    more = ", ..." if len(names) > _MAX_NAMED else ""
    loaded = f"; adapters: {', '.join(names[:_MAX_NAMED])}{more}" if names else ""
    raise ServiceError(
        ErrorReason.MODEL_NOT_FOUND, f"model: {name[:128]!r} is not served, {model.name!r} is{loaded}"
    )


def check_still_served(adapter: ServedAdapter | None, model: ServedModel, adapters: AdapterNames) -> None:
    """Raises ServiceError if a request's adapter was unloaded after the request was checked."""
    if adapter is not None and find_adapter(adapter.name, model, adapters) != adapter:
        raise ServiceError(ErrorReason.MODEL_NOT_FOUND, f"model: {adapter.name!r} was unloaded just now")


def check_load(request: admin_pb2.LoadAdapterRequest, model: ServedModel) -> tuple[str, str]:
    """The name of the adapter to load, and its path. Raises ServiceError."""
    if not is_adapter_name(request.name):
        raise invalid("name", ADAPTER_NAME_RULE)
    if request.name == model.name:
        raise invalid("name", "is the model's own")
    check_size("path", len(request.path.encode()), MAX_PATH_BYTES, "bytes")
    if not model.has_adapters:
        raise unsupported("LoadAdapter", "the executors have no adapters: they need --adapter-dir")
    return request.name, request.path or request.name


def loaded_adapter(adapter: ServedAdapter, requests: int, use: AdapterUse) -> admin_pb2.LoadedAdapter:
    """An adapter, as administrators see it."""
    return admin_pb2.LoadedAdapter(
        name=adapter.name,
        fingerprint=adapter.fingerprint,
        rank=adapter.rank,
        bytes=adapter.bytes,
        requests=requests,
        running=use.running,
        waiting=use.waiting,
    )


def loaded_adapters(
    adapters: Sequence[ServedAdapter], requests: Mapping[str, int], uses: Mapping[bytes, AdapterUse]
) -> admin_pb2.ListAdaptersResponse:
    """All of them; names of the same content tell the same sequences."""
    return admin_pb2.ListAdaptersResponse(
        adapters=[
            loaded_adapter(one, requests[one.name], uses.get(one.fingerprint, AdapterUse()))
            for one in adapters
        ]
    )


def named_adapters(adapters: Sequence[ServedAdapter]) -> list[pb.Adapter]:
    """The adapters, as clients see them."""
    return [pb.Adapter(name=one.name, fingerprint=one.fingerprint, rank=one.rank) for one in adapters]
