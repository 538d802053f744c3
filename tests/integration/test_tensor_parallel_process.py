"""A group of ranks is one executor: it starts, fails and ends as one, and no rank stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from paceline import aio, errors
from paceline.channel import Link, Security, open_channel
from paceline.executor.v1 import executor_pb2 as pb
from paceline.executor.v1 import executor_pb2_grpc as rpc

from tests.model.tiny import save
from tests.support.processes import ServiceProcess
from tests.support.stack import Stack, ids_of

pytestmark = pytest.mark.long

EXIT_FAULT, EXIT_MODEL = 70, 78
END_S = 10.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    save("qwen3", path)
    return path


def torch_flags(model: Path, ranks: int, *more: str) -> list[str]:
    flags = ["--backend", "torch", "--model", str(model), "--device", "cpu", "--pages", "256", *more]
    return [*flags, "--tensor-parallel", str(ranks)] if ranks > 1 else flags


def followers_of(process: ServiceProcess) -> list[int]:
    """The process ids of ranks 1 and up, as the executor's log names them."""
    lines = [line for line in process.log.splitlines() if "rank started" in line]
    return [int(line.partition('"pid": ')[2].partition("}")[0]) for line in lines]


def gone(pid: int) -> bool:
    """Whether it ended; its parent, or what adopted it, may still have to reap it."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    return True


def until(condition: Callable[[], bool], complaint: str, timeout_s: float = END_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.02)


@pytest.fixture
def executor(model: Path, tmp_path: Path) -> Iterator[ServiceProcess]:
    process = ServiceProcess("executor_service", torch_flags(model, 2, "--rank-timeout-s", "2"), tmp_path)
    try:
        process.wait_serving()
        yield process
    finally:
        process.kill()
        for pid in followers_of(process):
            until(lambda pid=pid: gone(pid), f"rank {pid} stays behind")  # type: ignore[misc]


def test_the_loss_of_an_idle_rank_ends_the_executor(executor: ServiceProcess) -> None:
    (follower,) = followers_of(executor)
    with open_channel(executor.address, Link.PRIVATE, Security()) as channel:
        stub = rpc.ExecutorServiceStub(channel)
        told, memory = (
            stub.GetInfo(pb.GetInfoRequest()).model,
            stub.GetStatus(pb.GetStatusRequest()).memory_bytes,
        )
    assert memory["process"] > 1.5 * memory["overhead"]  # which is rank 0's alone
    assert (told.ranks, told.parallelism) == (2, pb.PARALLELISM_TENSOR)
    os.kill(follower, signal.SIGKILL)
    assert executor.wait(END_S) == EXIT_FAULT
    assert "rank 1 ended" in executor.log


@pytest.mark.slow
def test_no_rank_outlives_the_one_that_serves(executor: ServiceProcess) -> None:
    (follower,) = followers_of(executor)
    executor.kill()
    until(lambda: gone(follower), "rank 1 stays behind")


@pytest.mark.slow
def test_sigterm_ends_all_ranks_in_order(executor: ServiceProcess) -> None:
    (follower,) = followers_of(executor)
    os.kill(follower, signal.SIGTERM)  # is rank 0's to decide
    assert executor.terminate(END_S) == 0
    assert gone(follower)
    assert "rank 1 ended" not in executor.log


@pytest.mark.slow
async def test_a_frozen_rank_ends_the_executor(executor: ServiceProcess) -> None:
    (follower,) = followers_of(executor)
    os.kill(follower, signal.SIGSTOP)
    async with aio.ExecutorClient(executor.address) as client:
        with pytest.raises(errors.PacelineError):
            await client.warmup(timeout_s=END_S)
    assert executor.wait(END_S) == EXIT_FAULT
    until(lambda: gone(follower), "a frozen rank stays behind")


@pytest.mark.slow
def test_a_model_that_can_not_be_split_is_refused(model: Path, tmp_path: Path) -> None:
    process = ServiceProcess("executor_service", torch_flags(model, 3), tmp_path)
    try:
        assert process.wait() == EXIT_MODEL
        assert "--tensor-parallel 3: 4 heads can't be split into equal shares" in process.log
        assert len(followers_of(process)) == 2
        for pid in followers_of(process):
            until(lambda pid=pid: gone(pid), f"rank {pid} stays behind")  # type: ignore[misc]
    finally:
        process.kill()


@pytest.mark.slow
def test_a_launcher_may_start_the_ranks(model: Path, tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = [*torch_flags(model, 1), "--port", "0", "--port-file", str(port_file)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, "-m", "executor_service", *flags], stdout=log, stderr=log)
    try:
        until(port_file.exists, "no port", 60)

        async def serves() -> None:
            async with aio.ExecutorClient(f"127.0.0.1:{port_file.read_text().strip()}") as client:
                while True:
                    with suppress(errors.Unavailable):  # it is loading
                        await client.warmup(timeout_s=60)
                        return
                    await asyncio.sleep(0.1)

        asyncio.run(serves())
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    finally:
        process.kill()
        process.wait()


STREAMS, TOKENS = 6, 100


def generation(client: aio.Client, seed: int) -> aio.Generation:
    return client.generate(
        token_ids=[3 + seed, 4, 5, 6],
        max_tokens=TOKENS,
        temperature=0.8 * (seed % 2),
        seed=seed,
        ignore_eos=True,
    )


@pytest.mark.slow
async def test_streams_go_on_with_the_same_tokens_when_a_rank_is_lost(model: Path, tmp_path: Path) -> None:
    """And those are the tokens of one rank."""
    one, stack = Stack(tmp_path / "one"), Stack(tmp_path / "two")
    try:
        one.start_executor(*torch_flags(model, 1))
        one.start_scheduler()
        one.scheduler.wait_serving()
        async with one.client() as client:
            runs = [generation(client, seed).collect() for seed in range(STREAMS)]
            expected = [ids_of(completions[0]) for completions in await asyncio.gather(*runs)]
        one.kill()

        group = stack.start_executor(*torch_flags(model, 2))
        stack.start_scheduler()
        stack.scheduler.wait_serving()
        async with stack.client() as client:
            lost = asyncio.Event()

            async def read(seed: int) -> list[int]:
                ids: list[int] = []
                async for event in generation(client, seed):
                    ids += getattr(event, "token_ids", ())
                    if len(ids) >= TOKENS // 5:
                        lost.set()
                return ids

            streams = [asyncio.create_task(read(seed)) for seed in range(STREAMS)]
            await lost.wait()
            executor = stack.executor(group)
            (follower,) = followers_of(executor)
            os.kill(follower, signal.SIGKILL)
            assert await asyncio.to_thread(executor.wait, END_S) == EXIT_FAULT
            await asyncio.to_thread(stack.restart_executor, group)
            async with asyncio.timeout(60):
                assert list(await asyncio.gather(*streams)) == expected
            assert (await client.status()).failed == 0
        await stack.all_pages_back(group)
    finally:
        one.kill()
        stack.kill()
