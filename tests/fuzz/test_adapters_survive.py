"""Hostile loads and unloads of adapters, amid traffic that names them: nothing breaks, and nothing leaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from paceline.channel import Link, open_channel
from paceline.executor.v1 import executor_pb2 as executor_pb
from paceline.executor.v1 import executor_pb2_grpc as executor_rpc

from tests.fuzz import adapter_traffic, public_traffic, test_executor_survives, test_public_api_survives
from tests.fuzz.conftest import SMALL_POOL
from tests.support.adapter_stack import Operator, slots_free
from tests.support.processes import ServiceProcess, running

pytestmark = pytest.mark.slow

COUNT = 10_000
MODELS = ("", *adapter_traffic.GOOD, "d", "pickle")
RPCS = (*public_traffic.RPCS, *public_traffic.EVALUATIONS, *adapter_traffic.RPCS)


@pytest.fixture
def adapted(tmp_path: Path) -> Iterator[ServiceProcess]:
    """An executor with room for some of the adapters."""
    directory = adapter_traffic.write_directory(tmp_path / "adapters")
    flags = ["--adapter-dir", str(directory), "--adapter-slots", "2", "--max-adapters", "4"]
    with running("executor_service", [*SMALL_POOL, *flags], tmp_path / "executor") as process:
        yield process


def unload_all(stub: executor_rpc.ExecutorServiceStub) -> None:
    for adapter in stub.ListAdapters(executor_pb.ListAdaptersRequest()).adapters:
        stub.UnloadAdapter(executor_pb.UnloadAdapterRequest(name=adapter.name))


def check_ledger(status: executor_pb.AdapterStatus) -> None:
    print(status)
    assert (status.loaded, status.bytes, status.used_slots) == (0, 0, 0)
    assert status.loads == status.unloads > 50  # enough of the hostile loads are good ones


def test_an_executor_survives_hostile_loads(adapted: ServiceProcess) -> None:
    test_executor_survives.check_traffic(adapted, COUNT, adapters=True)
    with open_channel(adapted.address, Link.PRIVATE) as channel:
        stub = executor_rpc.ExecutorServiceStub(channel)
        unload_all(stub)
        check_ledger(stub.GetStatus(executor_pb.GetStatusRequest()).adapters)


async def test_a_scheduler_survives_hostile_loads(adapted: ServiceProcess, tmp_path: Path) -> None:
    flags = ["--executor", adapted.address, "--max-queued-requests", "64"]
    with running("scheduler_service", flags, tmp_path / "scheduler") as scheduler:
        await test_public_api_survives.check_traffic(adapted, scheduler, COUNT, RPCS, MODELS)
        async with Operator(scheduler.address) as operator:
            for name in await operator.listed():
                await operator.unload(name)
    await slots_free(adapted.address)
    with open_channel(adapted.address, Link.PRIVATE) as channel:
        stub = executor_rpc.ExecutorServiceStub(channel)
        check_ledger(stub.GetStatus(executor_pb.GetStatusRequest()).adapters)
