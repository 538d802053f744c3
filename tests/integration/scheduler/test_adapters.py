"""Adapters through real processes: loaded while streams run, with their own tokens, whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from paceline import AdapterInfo, aio, errors
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from service_kit.identity import token_hash

from tests.support.adapter_files import write_adapter
from tests.support.adapter_stack import (
    NAMES,
    PROMPT,
    Operator,
    adapter_stack,
    adapter_status,
    generation,
    slots_free,
    tokens_of,
    write_adapters,
)
from tests.support.ports import kept_port
from tests.support.processes import ServiceProcess
from tests.support.serve import serving
from tests.support.stack import Stack, eventually, oracle_stack

TOKENS = 40


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    with adapter_stack(directory, slots=2, executors=2, executor=["--step-ms", "1"]) as stack:
        yield stack


@pytest.fixture
async def operator(stack: Stack) -> AsyncIterator[Operator]:
    async with Operator(stack.scheduler.address) as operator:
        yield operator
        for name in await operator.listed():
            await operator.unload(name)


async def test_adapters_are_loaded_and_unloaded_while_streams_run(stack: Stack, operator: Operator) -> None:
    async with stack.client() as client:
        plain = asyncio.create_task(tokens_of(client, "", 1, 200))
        loaded = await operator.load("a")
        assert await operator.load("a") == loaded  # once more is no error
        await operator.load("also-a", "a")
        held = generation(client, "a", 1, 200)
        await anext(held)
        running = await operator.listed()
        assert {name: one.requests for name, one in running.items()} == {"a": 1, "also-a": 0}
        assert running["a"].rank == 4
        info = await SchedulerServiceStub(operator._channel).GetModelInfo(pb.GetModelInfoRequest())
        assert [(one.name, one.fingerprint) for one in info.adapters] == [
            ("a", loaded.fingerprint),
            ("also-a", loaded.fingerprint),
        ]
        assert pb.CAPABILITY_ADAPTERS in info.capabilities
        assert await operator.unload("also-a")
        await check_scores(operator)
        assert (await operator.listed())["a"].requests == 3
        unloading = asyncio.create_task(operator.unload("a"))

        async def unlisted() -> bool:
            return "a" not in await operator.listed()

        await eventually(unlisted, "still listed")
        with pytest.raises(errors.NotFound, match="model: 'a' is not served, 'oracle' is"):
            await tokens_of(client, "a", 1, 1)
        whole = [id_ async for event in held for id_ in getattr(event, "token_ids", ())]
        assert await unloading
        assert not await operator.unload("a")
        await operator.load("again", "a")
        again = await tokens_of(client, "again", 1, 200)
        assert again[-len(whole) :] == whole
        assert again != await plain == await tokens_of(client, "", 1, 200)


async def check_scores(operator: Operator) -> None:
    """Those of a text with "a" are those of a prompt of a generation with "a", and not the model's."""
    stub = SchedulerServiceStub(operator._channel)
    ids = pb.TokenIds(ids=range(40))
    inputs = [pb.ScoreInput(token_ids=ids)]
    replies = [await stub.Score(pb.ScoreRequest(model=name, inputs=inputs)) for name in ("a", "")]
    scored, plain = [[one.logprob for one in reply.scores[0].logprobs] for reply in replies]
    request = pb.GenerateRequest(model="a", token_ids=ids, prompt_logprobs=0)
    request.stop.max_tokens = 1
    prompt = [one.logprob async for event in stub.Generate(request) for one in event.prompt_logprobs.logprobs]
    assert scored == pytest.approx(prompt, abs=1e-5)
    assert scored != pytest.approx(plain, abs=1e-2)


async def test_a_client_loads_an_adapter_and_started_names_its_fingerprint(stack: Stack) -> None:
    async with stack.client() as client:
        loaded = await client.load_adapter("b")
        assert await client.adapters() == (loaded,)
        assert (await client.model_info()).adapters == (AdapterInfo("b", loaded.fingerprint, loaded.rank),)
        held = generation(client, "b", 1, 2)
        await held.collect()
        assert held.started is not None
        assert held.started.adapter_fingerprint == loaded.fingerprint
        await check_evaluations(client, "b")
        assert await client.unload_adapter("b")
        with pytest.raises(errors.NotFound, match="'b' is not served"):
            await tokens_of(client, "b", 1, 2)


async def check_evaluations(client: aio.Client, name: str) -> None:
    """Scores are those of a generation with the adapter; they, vectors and ranks are not the model's."""
    texts = [PROMPT, "Once upon a time"]
    scored, plain = await client.score(texts, model=name), await client.score(texts)
    held = generation(client, name, 1, 1, prompt_logprobs=0)
    await held.collect()
    own = [one.logprob for one in held.prompt_logprobs]
    assert [one.logprob for one in scored.texts[0].logprobs] == pytest.approx(own, abs=1e-5)
    assert scored.texts[0].logprob != pytest.approx(plain.texts[0].logprob, abs=1e-2)
    vectors = [(await client.embed(texts, model=each)).vectors for each in (name, "")]
    assert all(one != pytest.approx(other, abs=1e-2) for one, other in zip(*vectors, strict=True))
    ranks = [await client.rerank("Which?", texts, method="likelihood", model=each) for each in (name, "")]
    scores = [{one.index: one.score for one in reply.results} for reply in ranks]
    assert scores[0] != pytest.approx(scores[1], abs=1e-2)


def stack_is_busy(client: aio.Client):  # type: ignore[no-untyped-def]
    async def busy() -> bool:
        return (await client.status()).running > 2

    return busy


class Churn:
    """Random loads, unloads, requests and departures; each request's tokens are its adapter's."""

    def __init__(
        self, client: aio.Client, operator: Operator, names: Sequence[str], seeds: int, seed: int
    ) -> None:
        self._client, self._operator, self._names, self._seeds = client, operator, names, seeds
        self._random = random.Random(seed)
        self._loaded = dict.fromkeys(names, False)  # surely: no unload is under way
        self._unloading = dict.fromkeys(names, 0)  # under way
        self._unloads = dict.fromkeys(names, 0)  # begun
        self._expected: dict[tuple[str, int], list[int]] = {}
        self.counts = dict.fromkeys(("load", "unload", "served", "left", "not found", "leaving"), 0)

    async def learn(self) -> None:
        """What each adapter, and the model, says to each seed."""
        for name in ("", *self._names):
            if name:
                await self._operator.load(name)
            for seed in range(self._seeds):
                self._expected[name, seed] = await tokens_of(self._client, name, seed, TOKENS)
            if name:
                assert await self._operator.unload(name)
        assert len({tuple(one) for one in self._expected.values()}) == len(self._expected)

    async def run(self, operations: int) -> None:
        places = asyncio.Semaphore(24)

        async def one(work: object) -> None:
            async with places:
                await work  # type: ignore[misc]

        async with asyncio.TaskGroup() as group:
            for _ in range(operations):
                kind = self._random.choices((self._load, self._unload, self._request), (2, 1, 7))[0]
                group.create_task(one(kind(self._random.choice(self._names))))
                await asyncio.sleep(self._random.choice((0, 0, 0.005)))

    async def finish(self) -> None:
        """Everything is unloaded."""
        for name in self._names:
            await self._operator.unload(name)

    async def _load(self, name: str) -> None:
        unloads, undisturbed = self._unloads[name], not self._unloading[name]
        try:
            await self._operator.load(name)
        except errors.DuplicateRequest as error:
            assert "is being unloaded" in error.message  # noqa: PT017
            self.counts["leaving"] += 1
        else:
            self._loaded[name] |= undisturbed and unloads == self._unloads[name]
            self.counts["load"] += 1

    async def _unload(self, name: str) -> None:
        self._loaded[name] = False
        self._unloads[name] += 1
        self._unloading[name] += 1
        self.counts["unload"] += await self._operator.unload(name)
        self._unloading[name] -= 1

    async def _request(self, name: str) -> None:
        name = self._random.choice((name, name, name, ""))
        seed, count = self._random.randrange(self._seeds), self._random.randrange(1, TOKENS + 1)
        leaves = self._random.random() < 0.2
        must_be_there = not name or self._loaded[name]
        unloads = self._unloads.get(name, 0)
        ids: list[int] = []
        try:
            async with generation(self._client, name, seed, count) as stream:
                async for event in stream:
                    ids += getattr(event, "token_ids", ())
                    if leaves and len(ids) > count // 2:
                        break
        except errors.NotFound:
            assert not must_be_there or unloads != self._unloads[name]
            self.counts["not found"] += 1
            return
        assert ids == self._expected[name, seed][: len(ids)]
        assert leaves or len(ids) == count
        self.counts["left" if leaves else "served"] += 1


def resident_mb(process: ServiceProcess) -> float:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


async def check_ledgers(address: str, stack: Stack) -> None:
    """No adapter is loaded, no slot is used, and all pages are free or cached."""
    await stack.all_pages_back(address)
    await slots_free(address)
    status = await adapter_status(address)
    assert (status.loaded, status.bytes, status.used_slots) == (0, 0, 0)
    assert status.loads == status.unloads
    assert status.slot_loads >= status.evictions


@pytest.mark.slow
async def test_random_loads_unloads_and_requests_leave_nothing_behind(
    stack: Stack, operator: Operator
) -> None:
    async with stack.client() as client:
        churn = Churn(client, operator, NAMES[:4], seeds=1, seed=1)
        await churn.learn()
        await churn.run(40)
        await churn.finish()
    for address in stack.addresses:
        await check_ledgers(address, stack)


@pytest.mark.slow
async def test_more_adapters_than_slots_take_turns_and_a_lost_executor_changes_no_token(
    stack: Stack, operator: Operator
) -> None:
    names = ["", *NAMES[:5]]
    for name in names[1:]:
        await operator.load(name)
    async with stack.client() as client:
        expected = [await tokens_of(client, name, 3, TOKENS) for name in names]
        assert len({tuple(one) for one in expected}) == len(names)
        streams = [asyncio.create_task(tokens_of(client, name, 3, TOKENS)) for name in names * 4]
        await eventually(stack_is_busy(client), "nothing runs")
        active = next(one.address for one in await client.executors() if one.active)
        await asyncio.to_thread(stack.executor(active).kill)
        assert await asyncio.gather(*streams) == expected * 4
        other = next(address for address in stack.addresses if address != active)
        await slots_free(other)
        assert (await adapter_status(other)).evictions > 0


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--steps-in-flight", "2"]])
async def test_1000_random_loads_unloads_and_requests_leave_nothing_behind(
    tmp_path: Path, flags: list[str]
) -> None:
    with adapter_stack(tmp_path, slots=4, scheduler=flags) as stack:
        async with stack.client() as client, Operator(stack.scheduler.address) as operator:
            churn = Churn(client, operator, NAMES, seeds=3, seed=2)
            await churn.learn()
            processes = (stack.scheduler, stack.executor(stack.addresses[0]))
            memory = []
            for _ in range(4):
                await churn.run(1000)
                memory.append([round(resident_mb(process), 1) for process in processes])
            await churn.finish()
        await check_ledgers(stack.addresses[0], stack)
        status = await adapter_status(stack.addresses[0])
        print(f"\n{churn.counts}\nMB of scheduler and executor {memory}\n{status}")
        for first, last in zip(memory[0], memory[-1], strict=True):
            assert last - first < 10


@pytest.mark.slow
async def test_speculation_changes_no_token_of_an_adapter(tmp_path: Path) -> None:
    with adapter_stack(tmp_path, slots=2, draft=["--draft-agreement", "0.7"]) as stack:
        async with stack.client() as client, Operator(stack.scheduler.address) as operator:
            names = NAMES[:4]
            for name in names:
                await operator.load(name)

            async def drafts() -> bool:
                return all(one.connected for one in await client.executors())

            await eventually(drafts, "the draft executor is not connected")
            expected = [await tokens_of(client, name, 5, TOKENS, speculation="off") for name in names]
            streams = (tokens_of(client, name, 5, TOKENS, speculation=4) for name in names * 3)
            assert await asyncio.gather(*streams) == expected * 3
            assert (await client.status()).drafted_tokens > 0


@pytest.mark.slow
async def test_a_pool_that_is_too_small_preempts_and_changes_no_token(tmp_path: Path) -> None:
    with adapter_stack(tmp_path, slots=2, executor=["--pages", "24"]) as stack:
        async with stack.client() as client, Operator(stack.scheduler.address) as operator:
            for name in NAMES[:4]:
                await operator.load(name)
            names = [*NAMES[:4], ""]
            expected = [await tokens_of(client, name, 5, 150) for name in names]
            assert await asyncio.gather(*(tokens_of(client, n, 5, 150) for n in names * 4)) == expected * 4
            assert (await client.status()).preemptions > 0


@pytest.mark.slow
async def test_20_killed_executors_change_no_token_of_an_adapter(tmp_path: Path) -> None:
    with adapter_stack(tmp_path, slots=2, executors=2, executor=["--step-ms", "4"]) as stack:
        async with stack.client() as client, Operator(stack.scheduler.address) as operator:
            for name in NAMES[:3]:
                await operator.load(name)
            names = ["", *NAMES[:3]]
            expected = [await tokens_of(client, name, 5, 60) for name in names]
            for _ in range(20):
                streams = [asyncio.create_task(tokens_of(client, name, 5, 60)) for name in names * 4]
                await eventually(stack_is_busy(client), "nothing runs")
                active = next(one.address for one in await client.executors() if one.active)
                await asyncio.to_thread(stack.executor(active).kill)
                assert await asyncio.gather(*streams) == expected * 4
                await asyncio.to_thread(stack.restart_executor, active)


@pytest.mark.slow
async def test_two_schedulers_share_the_slots_of_an_executor_and_undo_each_others_unloading(
    tmp_path: Path,
) -> None:
    with adapter_stack(tmp_path, slots=2) as stack:
        first = stack.scheduler
        stack.start_scheduler()
        second = stack.scheduler.wait_serving()
        try:
            async with (
                aio.Client(first.address) as one,
                aio.Client(second.address) as two,
                Operator(first.address) as operator,
                Operator(second.address) as other,
            ):
                for name in NAMES[:6]:
                    await operator.load(name)
                    await other.load(name)
                expected = [await tokens_of(one, name, 5, 30) for name in NAMES[:6]]
                runs = [tokens_of(client, n, 5, 30) for n in NAMES[:6] for client in (one, two)] * 3
                found = await asyncio.gather(*runs)
                assert found == [tokens for tokens in expected for _ in range(2)] * 3
                assert await operator.unload("a")
                with pytest.raises(errors.NotFound):
                    await tokens_of(one, "a", 5, 30)
                assert await tokens_of(two, "a", 5, 30) == expected[0]
                assert all(executor.losses == 0 for executor in await two.executors())
        finally:
            first.kill()


async def runs_on(scheduler: ServiceProcess) -> bool:
    async with aio.Client(scheduler.address) as client:
        return (await client.status()).running > 0


@pytest.mark.slow
async def test_a_stream_of_an_adapter_goes_on_on_another_scheduler_that_has_it(tmp_path: Path) -> None:
    with adapter_stack(tmp_path, slots=2, executor=["--step-ms", "4"]) as stack:
        first = stack.scheduler
        stack.start_scheduler()
        second = stack.scheduler.wait_serving()
        try:
            async with Operator(first.address) as operator, Operator(second.address) as other:
                await operator.load("a")
                await other.load("a")
            async with aio.Client([first.address, second.address]) as client:
                expected = await tokens_of(client, "a", 5, 200)
                held = generation(client, "a", 5, 200)
                ids: list[int] = []
                async for event in held:
                    ids += getattr(event, "token_ids", ())
                    if len(ids) > 20 and first.running and second.running:
                        (first if await runs_on(first) else second).kill()
                assert held.resumptions == 1
                assert ids == expected
        finally:
            first.kill()


@pytest.mark.slow
async def test_a_standby_executor_with_another_directory_is_refused_and_said(tmp_path: Path) -> None:
    with oracle_stack(
        tmp_path, executor=["--adapter-dir", str(write_adapters(tmp_path / "adapters"))]
    ) as stack:
        async with Operator(stack.scheduler.address) as operator, stack.client() as client:
            await operator.load("a")
            stack.scheduler.kill()
            port = kept_port()
            other = write_adapters(tmp_path / "others", first_seed=100)
            standby = stack.start_executor("--adapter-dir", str(other))
            stack.start_scheduler("--port", str(port))
            stack.scheduler.wait_serving()
        async with Operator(stack.scheduler.address) as operator, stack.client() as client:

            async def both() -> bool:
                return all(one.connected for one in await client.executors())

            await eventually(both, "not connected")
            with pytest.raises(errors.StaleState, match="path: a holds different adapters"):
                await operator.load("a")
            write_adapter(other / "a", seed=0)
            await operator.load("a")
            await asyncio.to_thread(stack.executor(standby).kill)
            write_adapter(other / "a", seed=99)
            await asyncio.to_thread(stack.restart_executor, standby)

            async def said() -> bool:
                details = {one.address: one.detail for one in await client.executors()}
                return "its adapter a is another one" in details[standby]

            await eventually(said, "not said")


@pytest.mark.slow
@pytest.mark.parametrize("admin", [True, False])
async def test_a_scheduler_loads_adapters_with_an_administrators_token_and_says_if_it_has_none(
    tmp_path: Path, admin: bool
) -> None:
    tokens, secret = tmp_path / "tokens.yaml", tmp_path / "token"
    tokens.write_text(json.dumps([{"name": "ours", "sha256": token_hash("t"), "admin": admin}]))
    secret.write_text("t")
    flags = ["--tokens-file", str(tokens)]
    with Closing(Stack(tmp_path)) as stack:
        directory = write_adapters(tmp_path / "adapters")
        stack.start_executor(*flags, "--adapter-dir", str(directory))
        stack.start_scheduler("--executor-token-file", str(secret))
        stack.scheduler.wait_serving()
        async with Operator(stack.scheduler.address) as operator:
            if admin:
                assert (await operator.load("a")).fingerprint
            else:
                with pytest.raises(errors.Unauthenticated, match="admin: true in its entry"):
                    await operator.load("a")


class Closing:
    """Kills a stack at the end of a block."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def __enter__(self) -> Stack:
        return self._stack

    def __exit__(self, *_: object) -> None:
        self._stack.kill()


@pytest.mark.slow
async def test_serve_passes_the_adapter_directory_on_and_a_restarted_scheduler_has_its_adapters(
    tmp_path: Path,
) -> None:
    directory = write_adapters(tmp_path / "adapters")
    flags = ("--adapter-dir", str(directory), "--adapter", "a", "--adapter", "mine=b", "-E", "pages=512")
    with serving(tmp_path, *flags) as serve:
        async with aio.Client(serve.address) as client:
            expected = [await tokens_of(client, name, 5, 20) for name in ("a", "mine", "")]
            assert len({tuple(one) for one in expected}) == 3
            os.kill(serve.children()["scheduler_service"], signal.SIGKILL)

            async def serves() -> bool:
                with suppress(errors.RetryLater):
                    return await tokens_of(client, "mine", 5, 20) == expected[1]
                return False

            await eventually(serves, "not restarted", timeout_s=60)
