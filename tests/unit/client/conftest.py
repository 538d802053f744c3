from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
    admin: FakeAdmin


@asynccontextmanager
async def serving_fake() -> AsyncIterator[Served]:
    fake, admin = FakeScheduler(), FakeAdmin()
    server = grpc.aio.server(options=server_options(Link.PUBLIC))
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(fake, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.Client(f"127.0.0.1:{port}") as client:
        yield Served(fake, f"127.0.0.1:{port}", client, admin)
    await server.stop(None)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving_fake() as served:
        yield served
