"""A stack whose oracle executors have adapters, and an administrator's calls to its scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
from paceline import aio, errors
from paceline.executor.v1 import executor_pb2
from paceline.scheduler.v1 import admin_pb2, admin_pb2_grpc

from tests.support.adapter_files import write_adapter
from tests.support.stack import Stack, eventually, ids_of, oracle_stack

PROMPT = "Once upon a time there was a row of a batch"
NAMES = tuple("abcdefgh")


def write_adapters(directory: Path, names: Sequence[str] = NAMES, first_seed: int = 0) -> Path:
    """A directory of different adapters."""
    for seed, name in enumerate(names, start=first_seed):
        write_adapter(directory / name, seed=seed)
    return directory


@contextmanager
def adapter_stack(
    directory: Path, *, slots: int, executor: Sequence[str] = (), **options: Any
) -> Iterator[Stack]:
    """A stack whose executors can load NAMES."""
    adapters = write_adapters(directory / "adapters")
    flags = ["--adapter-dir", str(adapters), "--adapter-slots", str(slots), *executor]
    with oracle_stack(directory, executor=flags, **options) as stack:
        yield stack


class Operator:
    """Loads and unloads adapters. Raises `paceline.errors.PacelineError`."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub: Any = admin_pb2_grpc.AdminServiceStub(self._channel)

    async def __aenter__(self) -> Operator:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def load(self, name: str, path: str = "") -> admin_pb2.LoadedAdapter:
        request = admin_pb2.LoadAdapterRequest(name=name, path=path)
        return (await self._call("LoadAdapter", request)).adapter

    async def unload(self, name: str) -> bool:
        return (await self._call("UnloadAdapter", admin_pb2.UnloadAdapterRequest(name=name))).unloaded

    async def listed(self) -> dict[str, admin_pb2.LoadedAdapter]:
        reply = await self._call("ListAdapters", admin_pb2.ListAdaptersRequest())
        return {adapter.name: adapter for adapter in reply.adapters}

    async def _call(self, method: str, request: Any) -> Any:
        try:
            return await getattr(self._stub, method)(request, timeout=60)
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc(error) from None


def generation(client: aio.Client, name: str, seed: int, tokens: int, **options: Any) -> aio.Generation:
    """A stream of an adapter, or with "" of the model, whose seed says everything of it."""
    return client.generate(
        PROMPT, model=name, seed=seed, temperature=1.0, max_tokens=tokens, ignore_eos=True, **options
    )


async def tokens_of(client: aio.Client, name: str, seed: int, tokens: int, **options: Any) -> list[int]:
    """The ids of such a stream."""
    [completion] = await generation(client, name, seed, tokens, **options).collect()
    return ids_of(completion)


async def adapter_status(address: str) -> executor_pb2.AdapterStatus:
    """The executor's counters."""
    async with aio.ExecutorClient(address) as client:
        return (await client.get_status(timeout_s=5)).adapters


async def slots_free(address: str) -> None:
    """Wait until no cache of this executor has an adapter."""

    async def free() -> bool:
        return (await adapter_status(address)).used_slots == 0

    await eventually(free, "slots are still used")
