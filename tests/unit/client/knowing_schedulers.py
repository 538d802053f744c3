# ruff: noqa: N802  RPC names are the proto's
"""Ideal schedulers with a directory, real servers over loopback, and the port of an attacker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import trustme
from paceline.channel import Link, server_options
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc

from tests.unit.client.ideal_scheduler import MODEL
from tests.unit.client.test_several_schedulers import Fake

TIMEOUT_S = 30.0


@dataclass
class Known(Fake):
    """An ideal scheduler with a directory. `model`: what it serves; `callers`: tokens that it was sent."""

    model: bytes = MODEL
    others: list[pb.SchedulerEntry] = field(default_factory=list)
    load: int = 0  # that it says it has
    looks: int = 0
    callers: list[Any] = field(default_factory=list)
    taken: int = 0

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.callers.append(dict(context.invocation_metadata()).get("authorization"))
        async for message in super().Generate(request, context):
            if message.HasField("started"):
                message.started.model_fingerprint = self.model
            self.taken += message.HasField("delta")
            yield message

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        self.callers.append(dict(context.invocation_metadata()).get("authorization"))
        return pb.GetModelInfoResponse(model_fingerprint=self.model)

    async def WatchSchedulers(self, request: pb.WatchSchedulersRequest, context: Any) -> Any:
        self.looks += 1
        yield pb.WatchSchedulersResponse(entries=[entry("own:1", load=self.load, written_by="")])
        yield pb.WatchSchedulersResponse(entries=self.others, complete=True)


def entry(address: str, load: int = 0, **fields: Any) -> pb.SchedulerEntry:
    told = {"model": "m", "model_fingerprint": MODEL, "instance": f"of {address}", "written_by": "x"}
    return pb.SchedulerEntry(address=address, load=pb.SchedulerLoad(running=load), **(told | fields))


@asynccontextmanager
async def served(fake: Known, certificate: trustme.LeafCert | None = None) -> AsyncIterator[str]:
    """Yields its address."""
    server = grpc.aio.server(options=server_options(Link.PUBLIC))
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(fake, server)
    if certificate is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        key, chain = certificate.private_key_pem.bytes(), certificate.cert_chain_pems[0].bytes()
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)]))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[str, bytearray]]:
    """An attacker's port without a certificate; yields its address, and the bytes that came."""
    received = bytearray()

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.extend(await reader.read(1 << 16))
        writer.close()

    server = await asyncio.start_server(read, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", received
    finally:
        server.close()
