"""A draft executor has the served model's vocabulary or is refused, and its faults delay no request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
from paceline.channel import PLAINTEXT
from paceline.executor.v1 import executor_pb2 as pb

from scheduler_service.core.errors import UnknownStep
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.step import CacheRow, Capacity, PlannedStep, StepAnswer
from scheduler_service.link.drafts import DraftPool
from scheduler_service.link.executor import Timing
from scheduler_service.loop.draft_loop import DraftLoop
from scheduler_service.loop.wake import Wake
from scheduler_service.metrics.metrics import Telemetry
from scheduler_service.model import ServedModel, TokenSpace
from tests.unit.scheduler_shell.fake_executor import FakeExecutor, serving
from tests.unit.scheduler_shell.models_made_here import MODEL
from tests.unit.scheduler_shell.test_link import MISSES_HEARTBEATS, TIMING

SERVED = replace(MODEL, vocabulary=TokenSpace(b"words", 10, "s"))


class FakeCore:
    """What the loop asks of the core, noted; each set of `rows` makes one draft step."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.rows: list[tuple[CacheRow, ...]] = []
        self.capacity: Capacity | None = None
        self.refuse = False
        self._number = 0

    def draft_ready(self, capacity: Capacity) -> None:
        self.calls.append("ready")
        self.capacity = capacity

    def draft_lost(self) -> None:
        self.calls.append("lost")

    def plan_draft(self, now: float) -> PlannedStep | None:
        if not self.rows:
            return None
        self._number += 1
        return PlannedStep(self._number, rows=self.rows.pop(0))

    def apply_draft(self, result: StepAnswer, now: float) -> None:
        if self.refuse:
            raise UnknownStep("not mine")
        self.calls.append(f"answer {result.number} {[row.tokens for row in result.rows]}")


class Drafting:
    """A draft pool and its loop, running, with a fake core."""

    def __init__(
        self, ports: list[int], served: Callable[[], ServedModel | None], timing: Timing = TIMING
    ) -> None:
        self.core = FakeCore()
        self._woken = asyncio.Event()
        wake = Wake()
        addresses = [f"127.0.0.1:{port}" for port in ports]

        def changed() -> None:
            wake.set()
            self._woken.set()

        self.pool = DraftPool(addresses, PLAINTEXT, timing, served, changed)
        core = cast(StepScheduler, self.core)
        self.loop = DraftLoop(core, self.pool, Telemetry(), wake, self._woken.set)

    def step(self, *rows: CacheRow) -> None:
        """As the main loop does after its own plan."""
        self.core.rows.append(rows)
        self.loop.plan(0.0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition, which is looked at after each change."""
        async with asyncio.timeout(60):
            while not condition():
                await self._woken.wait()
                self._woken.clear()


@asynccontextmanager
async def drafting(
    *ports: int, served: ServedModel | None = SERVED, timing: Timing = TIMING
) -> AsyncIterator[Drafting]:
    made = Drafting(list(ports), lambda: served, timing)
    tasks = [asyncio.create_task(made.pool.run()), asyncio.create_task(made.loop.run())]
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_draft_step_is_sent_and_its_answer_reaches_the_core() -> None:
    async with serving(FakeExecutor()) as port, drafting(port) as made:
        await made.until(lambda: made.core.calls == ["ready"])
        assert made.core.capacity is not None
        assert (made.core.capacity.max_drafts, made.core.capacity.max_steps) == (8, 6)
        made.step(CacheRow(1, 4), CacheRow(2, 5))
        await made.until(lambda: "answer 1 [[7], [7]]" in made.core.calls)
        made.step(CacheRow(1, 5))
        await made.until(lambda: "answer 2 [[7]]" in made.core.calls)


async def test_a_draft_step_planned_while_another_is_in_flight_is_sent_after_its_answer() -> None:
    fake = FakeExecutor()
    async with serving(fake) as port, drafting(port) as made:
        await made.until(lambda: made.core.calls == ["ready"])
        fake.steps.clear()
        made.step(CacheRow(1, 4))
        made.step(CacheRow(2, 5))
        fake.steps.set()
        await made.until(lambda: len(made.core.calls) == 3)
        assert made.core.calls == ["ready", "answer 1 [[7]]", "answer 2 [[7]]"]


async def test_a_draft_executor_that_was_lost_is_used_again_without_its_old_step() -> None:
    fake = FakeExecutor()
    async with serving(fake) as port, drafting(port, timing=MISSES_HEARTBEATS) as made:
        await made.until(lambda: made.core.calls == ["ready"])
        fake.steps.clear()
        made.step(CacheRow(1, 4))
        await asyncio.sleep(0)
        fake.heartbeats.clear()  # it hangs
        await made.until(lambda: "lost" in made.core.calls)
        fake.heartbeats.set()
        fake.steps.set()
        await made.until(lambda: made.core.calls == ["ready", "lost", "ready"])
        made.step(CacheRow(2, 1))
        await made.until(lambda: "answer 2 [[7]]" in made.core.calls)


async def test_an_answer_that_the_core_does_not_know_loses_the_draft_executor() -> None:
    async with serving(FakeExecutor()) as port, drafting(port) as made:
        await made.until(lambda: made.core.calls == ["ready"])
        made.core.refuse = True
        made.step(CacheRow(1, 4))
        await made.until(lambda: made.core.calls == ["ready", "lost", "ready"])


async def test_no_draft_executor_is_used_before_the_served_model_is_known() -> None:
    async with serving(FakeExecutor()) as port, drafting(port, served=None) as made:
        (link,) = made.pool.links
        await made.until(lambda: link.detail.startswith("waiting for the served model"))
        assert not made.pool.misconfigured.is_set()
        assert made.core.calls == []


def other(**change: Any) -> ServedModel:
    """The served model, with something of its vocabulary changed."""
    return replace(SERVED, vocabulary=replace(SERVED.vocabulary, **change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fingerprint": b"\xab" * 32}, "fingerprint abababababab"),
        ({"size": 11}, "11 tokens"),
        ({"sampler": "t"}, ", t)"),
    ],
)
async def test_another_vocabulary_at_the_first_handshake_is_a_mistake_that_names_both(
    change: dict[str, Any], said: str
) -> None:
    async with serving(FakeExecutor()) as port, drafting(port, served=other(**change)) as made:
        async with asyncio.timeout(60):
            await made.pool.misconfigured.wait()
        assert f"--draft-executor 127.0.0.1:{port}" in made.pool.mistake
        assert "10 tokens, fingerprint 776f726473, s" in made.pool.mistake
        assert said in made.pool.mistake


async def test_a_model_with_a_classification_head_drafts_nothing() -> None:
    fake = FakeExecutor()
    fake.capabilities = [pb.CAPABILITY_CLASSIFIER]
    async with serving(fake) as port, drafting(port) as made:
        async with asyncio.timeout(60):
            await made.pool.misconfigured.wait()
        assert "has a classification head in place of an output layer" in made.pool.mistake


async def test_another_vocabulary_at_a_later_handshake_is_a_refusal_and_no_mistake() -> None:
    fake = FakeExecutor()
    async with serving(fake) as port, drafting(port) as made:
        await made.until(lambda: made.core.calls == ["ready"])
        (link,) = made.pool.links
        fake.vocabulary, fake.epoch = b"others", 2
        link.lose("for the test")
        await made.until(lambda: "vocabulary" in link.detail)
        assert not link.ready
        assert not made.pool.misconfigured.is_set()
        assert made.core.calls == ["ready", "lost"]
        fake.vocabulary = b"words"
        await made.until(lambda: made.core.calls == ["ready", "lost", "ready"])


async def test_a_standby_draft_executor_takes_over_from_one_that_is_lost() -> None:
    first, second = FakeExecutor(), FakeExecutor()
    async with serving(first) as a, serving(second) as b, drafting(a, b) as made:
        await made.until(lambda: all(link.ready for link in made.pool.links))
        await made.until(lambda: made.core.calls == ["ready"])
        active = made.pool.active
        assert active is not None
        active.lose("for the test")
        await made.until(lambda: made.core.calls == ["ready", "lost", "ready"])
        assert made.pool.active is not active
