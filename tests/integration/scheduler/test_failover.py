"""Executors die, freeze and come back; clients notice only a pause, and get the same tokens."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from paceline import aio, errors

from tests.model.default_model import default_model
from tests.support.processes import ServiceProcess
from tests.support.stack import HEAL_S, Stack, eventually, ids_of, oracle_stack

pytestmark = pytest.mark.long

STREAMS, TOKENS = 16, 120
EXECUTOR = ["--step-ms", "4"]


def generation(client: aio.Client, seed: int, tokens: int = TOKENS) -> aio.Generation:
    return client.generate(
        f"Prompt number {seed}", max_tokens=tokens, seed=seed, temperature=0.8, ignore_eos=True
    )


async def undisturbed(client: aio.Client, tokens: int = TOKENS) -> list[list[int]]:
    runs = [generation(client, seed, tokens).collect() for seed in range(STREAMS)]
    return [ids_of(completions[0]) for completions in await asyncio.gather(*runs)]


async def disturbed(
    client: aio.Client, disturb: Callable[[], None], tokens: int = TOKENS
) -> tuple[list[list[int]], float]:
    """The streams' ids, and the longest silence of any of them after the disturbance was over."""
    arrivals: list[float] = []
    began = asyncio.Event()
    healed = 0.0

    async def read(seed: int) -> list[int]:
        ids: list[int] = []
        silence = 0.0
        async for event in generation(client, seed, tokens):
            if hasattr(event, "token_ids"):
                ids += event.token_ids
            now = time.monotonic()
            if healed and not silence:
                silence = now - healed
                arrivals.append(silence)
            if len(ids) >= tokens // 5:
                began.set()
        return ids

    tasks = [asyncio.create_task(read(seed)) for seed in range(STREAMS)]
    await began.wait()
    await asyncio.to_thread(disturb)
    healed = time.monotonic()
    async with asyncio.timeout(10 * HEAL_S):
        return list(await asyncio.gather(*tasks)), max(arrivals)


async def _heals(stack: Stack, times: int, disturb: Callable[[], None], tokens: int = TOKENS) -> None:
    async with stack.client() as client:
        expected = await undisturbed(client, tokens)
        for _ in range(times):
            ids, silence_s = await disturbed(client, disturb, tokens)
            assert ids == expected
            assert silence_s < HEAL_S
        status = await client.status()
        assert status.failed == 0
    for address in stack.addresses:
        await stack.all_pages_back(address)


def killing(stack: Stack, address: str) -> Callable[[], None]:
    def disturb() -> None:
        stack.executor(address).kill()
        stack.restart_executor(address)

    return disturb


def freezing(stack: Stack, address: str) -> Callable[[], None]:
    def disturb() -> None:
        stack.executor(address).signal(signal.SIGSTOP)
        time.sleep(0.5)  # a supervisor needs a moment to notice
        stack.restart_executor(address)

    return disturb


def pausing(stack: Stack, address: str) -> Callable[[], None]:
    """Frozen long enough to be given up, and then alive again with all its old caches."""

    def disturb() -> None:
        before = stack.scheduler.log.count("executor lost")
        process = stack.executor(address)
        process.signal(signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while stack.scheduler.log.count("executor lost") == before:
            assert time.monotonic() < deadline, "a frozen executor is not noticed"
            time.sleep(0.05)
        process.signal(signal.SIGCONT)

    return disturb


FAULTS = [killing, freezing, pausing]


@pytest.mark.parametrize("fault", [killing, freezing])
async def test_streams_go_on_with_the_same_tokens_after_a_fault(
    fault: Callable[[Stack, str], Callable[[], None]], tmp_path: Path
) -> None:
    with oracle_stack(tmp_path, executor=EXECUTOR) as stack:
        (address,) = stack.addresses
        await _heals(stack, 1, fault(stack, address))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
async def test_streams_go_on_with_the_same_tokens_after_each_of_20_faults(
    fault: Callable[[Stack, str], Callable[[], None]], tmp_path: Path
) -> None:
    with oracle_stack(tmp_path, executor=EXECUTOR) as stack:
        (address,) = stack.addresses
        await _heals(stack, 20, fault(stack, address))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("fault", [killing, freezing])
async def test_streams_of_the_default_model_go_on_with_the_same_tokens_after_each_of_20_faults(
    fault: Callable[[Stack, str], Callable[[], None]], tmp_path: Path
) -> None:
    model = ["--backend", "torch", "--model", str(default_model())]
    with oracle_stack(tmp_path, executor=model) as stack:
        (address,) = stack.addresses
        await _heals(stack, 20, fault(stack, address), tokens=40)


async def test_a_standby_executor_takes_over_from_one_that_is_lost(tmp_path: Path) -> None:
    with oracle_stack(tmp_path, executor=EXECUTOR, executors=2) as stack:
        async with stack.client() as client:
            active = next(one.address for one in (await client.executors()) if one.active)
            expected = await undisturbed(client)
            ids, silence_s = await disturbed(client, stack.executor(active).kill)
            assert ids == expected
            assert silence_s < HEAL_S
            standby = next(one for one in (await client.executors()) if one.active)
            assert standby.address != active
            stack.restart_executor(active)

            async def back() -> bool:
                return all(one.connected for one in (await client.executors()))

            await eventually(back, "the old one is not taken back")
            ids, _ = await disturbed(client, stack.executor(standby.address).kill)
            assert ids == expected
        await stack.all_pages_back(active)


async def test_a_standby_executor_takes_over_from_one_that_drains(tmp_path: Path) -> None:
    with oracle_stack(tmp_path, executor=EXECUTOR, executors=2) as stack:
        async with stack.client() as client:
            active = next(one.address for one in (await client.executors()) if one.active)
            expected = await undisturbed(client)
            draining = stack.executor(active)
            ids, silence_s = await disturbed(client, lambda: draining.signal(signal.SIGTERM))
            assert ids == expected
            assert silence_s < HEAL_S
            assert await asyncio.to_thread(draining.wait, 10) == 0
            assert (await client.status()).failed == 0


async def test_an_executor_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    try:
        right = stack.start_executor(*EXECUTOR)
        wrong = stack.start_executor(*EXECUTOR, "--vocab-size", "1024")
        stack.start_scheduler()
        stack.scheduler.wait_serving()
        async with stack.client() as client:

            async def told() -> bool:
                by_address = {one.address: one for one in (await client.executors())}
                served = next(one for one in by_address.values() if one.active)
                other = by_address[wrong if served.address == right else right]
                return not other.connected and "another model" in other.detail

            await eventually(told, "two models are taken for one")
    finally:
        stack.kill()


async def test_without_an_executor_streams_end_after_the_failover_timeout(tmp_path: Path) -> None:
    with oracle_stack(tmp_path, executor=EXECUTOR, scheduler=["--failover-timeout-s", "0.5"]) as stack:
        async with aio.Client(stack.scheduler.address, failover_timeout_s=0) as client:
            running = generation(client, 1)
            await anext(running)
            (address,) = stack.addresses
            stack.executor(address).kill()
            waiting = generation(client, 2)
            with pytest.raises(errors.StreamLost) as lost:
                await running.collect()
            assert lost.value.reason == "NOT_READY"
            with pytest.raises(errors.Unavailable) as caught:
                await waiting.collect()
            assert caught.value.retry_after_s is not None
            stack.restart_executor(address)
            await eventually_complete(client)


async def eventually_complete(client: aio.Client) -> None:
    async def completes() -> bool:
        try:
            await client.completions("x", max_tokens=1)
        except errors.Unavailable:
            return False
        return True

    await eventually(completes, "it does not heal")


POISON = 77


async def test_a_request_that_kills_executors_ends_alone(tmp_path: Path) -> None:
    with oracle_stack(tmp_path, executor=EXECUTOR) as stack:
        async with stack.client() as client:
            # Prompts and answers without the poison, so that only its bearer kills.
            clean = [[1 + seed, 2, 3] for seed in range(8)]
            bias = {POISON: -1000.0}
            options = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.0, "logit_bias": bias}
            alone = [client.completions(token_ids=ids, **options) for ids in clean]  # type: ignore[arg-type]
            expected = [ids_of(completions[0]) for completions in await asyncio.gather(*alone)]
            (address,) = stack.addresses
            stack.change_executor(address, *EXECUTOR, "--exit-on-token", str(POISON))
            done = asyncio.Event()

            async def supervise() -> None:
                while not done.is_set():
                    if not stack.executor(address).running:
                        await asyncio.to_thread(stack.restart_executor, address, wait=False)
                    await asyncio.sleep(0.05)

            supervisor = asyncio.create_task(supervise())
            runs = [client.generate(token_ids=ids, **options).collect() for ids in clean]  # type: ignore[arg-type]
            streams = asyncio.gather(*runs)
            with pytest.raises(errors.InternalError, match="lost"):
                await client.completions(token_ids=[4, POISON, 5], **options)  # type: ignore[arg-type]
            assert [ids_of(completions[0]) for completions in await streams] == expected
            done.set()
            await supervisor
            assert (await client.status()).failed == 1


async def test_a_restarted_scheduler_frees_the_caches_of_its_killed_process_and_no_others(
    tmp_path: Path,
) -> None:
    stack = Stack(tmp_path)
    schedulers: list[ServiceProcess] = []

    def start(name: str) -> ServiceProcess:
        flags = ["--executor", address, "--instance", name]
        schedulers.append(
            ServiceProcess("scheduler_service", flags, tmp_path / f"scheduler{len(schedulers)}")
        )
        return schedulers[-1].wait_serving()

    try:
        address = stack.start_executor(*EXECUTOR)
        killed, other = start("left"), start("right")
        async with aio.Client(killed.address) as left, aio.Client(other.address) as right:
            expected = ids_of((await generation(right, 1).collect())[0])
            gone, staying = generation(left, 2, 2000), generation(right, 1)
            await anext(gone)
            await anext(staying)
            killed.kill()
            back = await asyncio.to_thread(start, "left")
            async with aio.ExecutorClient(address) as executor:
                assert (await executor.get_status()).sessions == 2  # no lease is waited for
            rest = ids_of((await staying.collect())[0])
            assert rest == expected[-len(rest) :]
            assert (await right.executors())[0].losses == 0
            async with aio.Client(back.address) as again:
                assert ids_of((await generation(again, 1).collect())[0]) == expected
    finally:
        for scheduler in schedulers:
            scheduler.kill()
        stack.kill()
