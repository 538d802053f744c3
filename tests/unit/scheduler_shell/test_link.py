"""A link notices every kind of loss, and does not mistake a long step for one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from paceline.aio.executor import ExecutorClient
from paceline.channel import PLAINTEXT
from paceline.errors import Unavailable
from paceline.executor.v1 import executor_pb2 as pb

from scheduler_service.core.step import CacheRow, PlannedStep
from scheduler_service.link.exchange import ExecutorLostError, StepExchange
from scheduler_service.link.executor import ExecutorLink, Timing
from scheduler_service.link.pool import ExecutorPool
from scheduler_service.text.job import TextLimits
from scheduler_service.text.pool import TextPool
from tests.support.ports import kept_port
from tests.unit.scheduler_shell.fake_executor import FakeExecutor, serving
from tests.unit.scheduler_shell.models_made_here import LIMITS

TIMING = Timing(
    heartbeat_interval_s=0.02, heartbeat_timeout_s=30, step_timeout_s=30, retry_s=0.02, retry_max_s=0.05
)
MISSES_HEARTBEATS = replace(TIMING, heartbeat_timeout_s=0.3)
MISSES_STEPS = replace(TIMING, step_timeout_s=0.3)
PLAN = PlannedStep(1, rows=(CacheRow(1, 1),))


class Pool:
    """A pool that runs, and tells when something has changed."""

    def __init__(self, ports: list[int], timing: Timing = TIMING) -> None:
        self._changed = asyncio.Event()
        addresses = [f"127.0.0.1:{port}" for port in ports]
        self.pool = ExecutorPool(
            addresses, PLAINTEXT, timing, LIMITS, TextPool(TextLimits()), self._changed.set
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition, which is looked at after each change."""
        async with asyncio.timeout(60):
            while not condition():
                await self._changed.wait()
                self._changed.clear()

    async def heartbeat(self) -> None:
        """Wait for the next one that is answered."""
        self._changed.clear()
        await self._changed.wait()

    async def active(self) -> tuple[ExecutorLink, StepExchange]:
        """The active link, and an exchange of steps over it."""
        await self.until(lambda: self.pool.choose() is not None)
        link = self.pool.active
        assert link is not None
        return link, link.open_exchange()


@asynccontextmanager
async def running(*ports: int, timing: Timing = TIMING) -> AsyncIterator[Pool]:
    pool = Pool(list(ports), timing)
    task = asyncio.create_task(pool.pool.run())
    try:
        yield pool
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def step(exchange: StepExchange) -> list[int]:
    await exchange.send(PLAN)
    async with asyncio.timeout(60):
        return (await exchange.receive()).rows[0].tokens


async def test_a_step_is_sent_and_answered() -> None:
    async with serving(FakeExecutor()) as port, running(port) as pool:
        link, exchange = await pool.active()
        assert await step(exchange) == [7]
        assert await step(exchange) == [7]
        assert link.step_age_s == 0


@pytest.mark.parametrize(
    "reply",
    [
        pb.StreamUnifiedDecodeResponse(error=pb.Error(code=5, message="no such session")),
        pb.StreamUnifiedDecodeResponse(result=pb.StepResult()),
        pb.StreamUnifiedDecodeResponse(
            result=pb.StepResult(
                rows=pb.RowResults(kv_lengths=[1], token_counts=[0], errors=[pb.Error(index=9)])
            )
        ),
    ],
)
async def test_a_reply_that_answers_no_step_loses_the_executor_and_a_new_session_replaces_the_old(
    reply: pb.StreamUnifiedDecodeResponse,
) -> None:
    fake = FakeExecutor()
    async with serving(fake) as port, running(port) as pool:
        link, exchange = await pool.active()
        fake.reply = reply
        with pytest.raises(ExecutorLostError):
            await step(exchange)
        fake.reply = None
        assert not link.ready
        link, exchange = await pool.active()
        assert await step(exchange) == [7]
        assert fake.opened == [0, 101]


async def test_in_a_restarted_executor_there_is_no_session_to_replace() -> None:
    fake = FakeExecutor()
    async with serving(fake) as port, running(port) as pool:
        link, _ = await pool.active()
        fake.epoch = 2
        link.lose("for the test")
        await pool.active()
        assert fake.opened == [0, 0]


async def test_a_hanging_event_loop_loses_the_executor_in_the_middle_of_a_step() -> None:
    fake = FakeExecutor()
    async with serving(fake) as port, running(port, timing=MISSES_HEARTBEATS) as pool:
        _, exchange = await pool.active()
        fake.steps.clear()
        fake.heartbeats.clear()
        with pytest.raises(ExecutorLostError, match="heartbeat"):
            await step(exchange)
        fake.heartbeats.set()


async def test_a_call_whose_channel_is_closed_by_another_task_is_unavailable_and_no_cancellation() -> None:
    fake = FakeExecutor()
    fake.heartbeats.clear()
    async with serving(fake) as port:
        client = ExecutorClient(f"127.0.0.1:{port}")
        call = asyncio.create_task(client.get_status(1))
        await asyncio.sleep(0)  # it is under way
        await client.close()
        with pytest.raises(Unavailable, match="closed"):
            await call
        cancelled = asyncio.create_task(ExecutorClient(f"127.0.0.1:{port}").get_status(1))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled


async def test_a_step_that_makes_no_progress_loses_the_executor() -> None:
    fake = FakeExecutor()
    async with serving(fake) as port, running(port, timing=MISSES_STEPS) as pool:
        _, exchange = await pool.active()
        fake.steps.clear()
        with pytest.raises(ExecutorLostError, match="progress"):
            await step(exchange)
        fake.steps.set()


@pytest.mark.parametrize("turns", range(5))
async def test_a_pool_can_be_stopped_at_any_moment_of_a_loss(turns: int) -> None:
    async with serving(FakeExecutor()) as port:
        pool = Pool([port])
        running = asyncio.create_task(pool.pool.run())
        link, _ = await pool.active()
        await pool.heartbeat()
        link.lose("for the test")
        for _ in range(turns):  # of the event loop: how far the link has noticed
            await asyncio.sleep(0)
        running.cancel()
        async with asyncio.timeout(60):
            await asyncio.wait([running])
        assert running.cancelled()


async def test_a_step_is_waited_for_while_the_executor_runs_other_steps() -> None:
    fake = FakeExecutor()
    async with serving(fake) as port, running(port, timing=MISSES_STEPS) as pool:
        link, exchange = await pool.active()
        fake.steps.clear()
        fake.step_age_s = 0.01  # the executor runs a step of another session
        waiting = asyncio.create_task(step(exchange))
        await pool.until(lambda: link.step_age_s > 2 * MISSES_STEPS.step_timeout_s)
        assert link.ready
        fake.steps.set()
        assert await waiting == [7]


async def test_a_restarted_executor_is_used_again_on_its_port() -> None:
    async with serving(FakeExecutor(), kept_port()) as port:
        pool_context = running(port)
        pool = await pool_context.__aenter__()
        link, exchange = await pool.active()
        assert await step(exchange) == [7]
    with pytest.raises(ExecutorLostError):
        await step(exchange)
    restarted = FakeExecutor()
    restarted.epoch = 2
    async with serving(restarted, port):
        assert await step((await pool.active())[1]) == [7]
        assert link.losses == 1
    await pool_context.__aexit__(None, None, None)


async def test_another_model_is_refused_and_only_the_first_tokenizer_is_fetched() -> None:
    first, same, other = FakeExecutor(), FakeExecutor(), FakeExecutor()
    other.model = b"another"
    async with serving(first) as a, running(a) as pool:
        await pool.active()
        async with serving(same) as b, serving(other) as c, running(b, c) as late:
            late.pool.served = pool.pool.served
            await late.until(lambda: late.pool.links[0].ready)
            assert not late.pool.links[1].ready
            assert same.tokenizers_sent == other.tokenizers_sent == 0


async def test_loading_and_draining_executors_are_waited_for() -> None:
    fake = FakeExecutor()
    fake.state = pb.EXECUTOR_STATE_LOADING
    async with serving(fake) as port, running(port) as pool:
        link = pool.pool.links[0]
        await pool.until(lambda: link.detail.startswith("loading"))
        fake.state = pb.EXECUTOR_STATE_SERVING
        await pool.active()
        assert link.detail == ""


async def test_a_draining_executor_is_used_until_another_is_ready_or_its_caches_are_released() -> None:
    fake = FakeExecutor()
    async with serving(fake) as port, running(port) as pool:
        link, exchange = await pool.active()
        fake.state = pb.EXECUTOR_STATE_DRAINING
        await pool.until(lambda: link.draining)
        assert not pool.pool.should_leave(link, holds_caches=True)
        assert pool.pool.should_leave(link, holds_caches=False)
        assert await step(exchange) == [7]


async def test_session_owners_differ_between_links_and_are_the_same_after_a_restart() -> None:
    fake = FakeExecutor()
    async with serving(fake) as port:
        addresses = [f"127.0.0.1:{port}", f"localhost:{port}"]
        for _ in range(2):  # the second time after a kill
            ready = asyncio.Event()
            pool = ExecutorPool(
                addresses, PLAINTEXT, TIMING, LIMITS, TextPool(TextLimits()), ready.set, "host/127.0.0.1:5"
            )
            task = asyncio.create_task(pool.run())
            async with asyncio.timeout(60):
                while not all(link.ready for link in pool.links):
                    await ready.wait()
                    ready.clear()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert sorted(fake.owners) == ["host/127.0.0.1:5#0"] * 2 + ["host/127.0.0.1:5#1"] * 2
