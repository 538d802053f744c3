from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc.aio
import pytest
from paceline import aio
from paceline.channel import Link, server_options
from paceline.scheduler.v1 import admin_pb2_grpc, scheduler_pb2_grpc

from tests.unit.client.fake_scheduler import FakeAdmin, FakeScheduler


@dataclass
class Served:
    """A fake scheduler on a real port, and a client of it."""

    fake: FakeScheduler
    address: str
    client: aio.Client


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    fake = FakeScheduler()
    server = grpc.aio.server(options=server_options(Link.PUBLIC))
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(fake, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(FakeAdmin(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.Client(f"127.0.0.1:{port}") as client:
        yield Served(fake, f"127.0.0.1:{port}", client)
    await server.stop(None)
