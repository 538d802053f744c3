"""Two schedulers share an executor. When one dies or freezes, its streams continue on the other."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import paceline
import pytest
from paceline import aio, errors
from paceline.affinity import affinity_key, choice
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.types import Completion
from pydantic import BaseModel, Field

from tests.model.default_model import default_model
from tests.support.held_streams import END_S, HeldStream, essence, generation, held, undisturbed
from tests.support.ports import kept_port
from tests.support.processes import ServiceProcess
from tests.support.stack import Stack

pytestmark = pytest.mark.long

ORACLE = ("--step-ms", "4")


class Pair:
    """One executor, and two schedulers on ports that they keep across restarts.

    `streams`, `tokens`: how many streams clients hold, and the length of each.
    """

    def __init__(self, directory: Path, executor: tuple[str, ...], streams: int, tokens: int) -> None:
        self.streams, self.tokens = streams, tokens
        self._directory = directory
        self.stack = Stack(directory)
        self._starts = 0
        try:
            self.executor = self.stack.start_executor(*executor)
            self._ports = kept_port(), kept_port()
            self.schedulers = [self.start(which) for which in range(2)]
            for scheduler in self.schedulers:
                scheduler.wait_serving()
        except BaseException:
            self.kill()
            raise

    def start(self, which: int) -> ServiceProcess:
        """A scheduler on the port of this number."""
        self._starts += 1
        arguments = ["--executor", self.executor, "--port", str(self._ports[which])]
        return ServiceProcess("scheduler_service", arguments, self._directory / f"scheduler{self._starts}")

    def restart(self, which: int) -> None:
        """What died or froze is replaced by a new one."""
        self.schedulers[which].kill()
        self.schedulers[which] = self.start(which)
        self.schedulers[which].wait_serving()

    @property
    def addresses(self) -> list[str]:
        """Of the schedulers."""
        return [scheduler.address for scheduler in self.schedulers]

    def kill(self) -> None:
        """End everything."""
        for scheduler in getattr(self, "schedulers", []):
            scheduler.kill()
        self.stack.kill()


@contextmanager
def pair(directory: Path, *executor: str, streams: int = 6, tokens: int = 100) -> Iterator[Pair]:
    made = Pair(directory, executor, streams, tokens)
    try:
        yield made
    finally:
        made.kill()


async def reference(pair: Pair) -> list[list[Completion]]:
    return await undisturbed(pair.addresses, pair.streams, pair.tokens)


async def disturbed(pair: Pair, disturb: Callable[[], None], tokens: int = 1) -> list[HeldStream]:
    """All streams, disturbed when each has had so many tokens; none fails."""
    reads = await held(pair.addresses, disturb, pair.streams, pair.tokens, after_tokens=tokens)
    for read in reads:
        if read.error is not None:
            raise read.error
    return reads


FAULTS = [signal.SIGKILL, signal.SIGSTOP]


async def survive(pair: Pair, fault: signal.Signals, expected: list[list[Completion]], which: int = 0) -> str:
    """The promise, once. Returns a line about pauses."""
    for _ in range(20):  # until the fault did hit a stream: a machine that stands still may miss all
        reads = await disturbed(pair, lambda: pair.schedulers[which].signal(fault))
        assert [read.completions for read in reads] == expected
        resumed = [read for read in reads if read.generation.resumptions]
        await asyncio.to_thread(pair.restart, which)
        if resumed:
            longest = max(read.longest_pause_s for read in resumed)
            return f"{fault.name}: {len(resumed)} of {len(reads)} continued, longest pause {longest:.2f} s"
    raise AssertionError("no stream was ever interrupted")


@pytest.mark.parametrize("fault", FAULTS)
async def test_streams_go_on_on_the_other_scheduler_with_the_same_tokens(
    tmp_path: Path, fault: signal.Signals
) -> None:
    with pair(tmp_path, *ORACLE) as both:
        expected = await reference(both)
        print(await survive(both, fault, expected))
        await both.stack.all_pages_back(both.executor)


class Sizes(BaseModel):
    sizes: Annotated[list[Annotated[int, Field(ge=100, le=999)]], Field(min_length=100, max_length=100)]


async def test_a_blocking_clients_stream_goes_on_on_the_other_scheduler_to_the_same_instance(
    tmp_path: Path,
) -> None:
    def use(addresses: list[str], disturb: Callable[[], None] | None) -> tuple[Completion, Sizes, int]:
        with paceline.Client(addresses) as client:
            running = client.generate("x", seed=1, temperature=1.0, schema=Sizes)
            for _ in running:
                if disturb is not None:
                    disturb()
                    disturb = None
            [whole] = running.collect()
            [again] = client.completions("x", seed=1, temperature=1.0, schema=Sizes, max_tokens=30)
        assert list(again.token_ids) == list(whole.token_ids[:30])
        with pytest.raises(errors.InvalidOutput):
            again.parsed  # noqa: B018
        assert len(whole.parsed.sizes) == 100
        return essence(whole), whole.parsed, running.resumptions

    with pair(tmp_path, *ORACLE, "--step-ms", "10") as both:
        key = affinity_key(pb.GenerateRequest(text="x"))
        begins = both.addresses.index(choice(key, dict.fromkeys(both.addresses, 0)))
        expected, resumed = await asyncio.gather(
            asyncio.to_thread(use, [both.addresses[1 - begins]], None),
            asyncio.to_thread(use, both.addresses, both.schedulers[begins].kill),
        )
        assert resumed == (*expected[:2], 1)


async def test_with_one_address_a_stream_waits_for_its_scheduler_to_come_back(tmp_path: Path) -> None:
    with pair(tmp_path, *ORACLE, streams=1) as both:
        [expected] = await reference(both)
        async with aio.Client(both.addresses[0], failover_timeout_s=END_S) as client:
            running = generation(client, 0, both.tokens)
            got = HeldStream(running)
            async for event in running:
                got.events.append((0.0, event))
                if len(got.events) == 1:
                    await asyncio.to_thread(both.restart, 0)
        assert got.completions == expected
        assert running.resumptions >= 1


async def test_a_scheduler_that_is_shut_down_hands_its_streams_to_the_other(tmp_path: Path) -> None:
    with pair(tmp_path, *ORACLE) as both:
        expected = await reference(both)

        def twice() -> None:
            for _ in range(2):
                both.schedulers[0].signal(signal.SIGTERM)

        reads = await disturbed(both, twice)
        assert [read.completions for read in reads] == expected


async def test_without_another_scheduler_a_lost_stream_says_so(tmp_path: Path) -> None:
    with pair(tmp_path, *ORACLE) as both:
        async with aio.Client(both.addresses[0], failover_timeout_s=0.2) as client:
            running = generation(client, 0, 30_000)
            await anext(running)
            both.schedulers[0].kill()
            with pytest.raises(errors.StreamLost, match="could not be continued"):
                await running.collect()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
async def test_no_stream_fails_in_50_faults(tmp_path: Path, fault: signal.Signals) -> None:
    with pair(tmp_path, *ORACLE, streams=16, tokens=300) as both:
        expected = await reference(both)
        for run in range(50):
            print(f"{run + 1:2}", await survive(both, fault, expected, run % 2), flush=True)
        await both.stack.all_pages_back(both.executor)


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [True, False])
async def test_on_a_pool_that_fits_one_and_a_half_requests_streams_go_on_too(
    tmp_path: Path, restarted: bool
) -> None:
    """The dead one's pages come back when it is restarted, else when its lease ends."""
    with pair(tmp_path, *ORACLE, "--pages", "30", streams=2, tokens=280) as both:
        expected = await reference(both)

        def die() -> None:
            both.schedulers[0].kill()
            if restarted:
                both.schedulers[0] = both.start(0)

        reads = await disturbed(both, die, tokens=150)
        assert [read.completions for read in reads] == expected
        print("pauses", [f"{read.longest_pause_s:.1f} s" for read in reads])
        await both.stack.all_pages_back(both.executor)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("fault", FAULTS)
async def test_no_stream_of_the_default_model_fails_in_5_faults(
    tmp_path: Path, fault: signal.Signals
) -> None:
    flags = ("--backend", "torch", "--dtype", "int8", "--model", str(default_model()))
    with pair(tmp_path, *flags, streams=16, tokens=60) as both:
        expected = await reference(both)
        for run in range(5):
            print(f"{run + 1:2}", await survive(both, fault, expected, run % 2), flush=True)
