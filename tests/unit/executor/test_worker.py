"""The device thread: order, refusals, leaving clients, leases, and the end of the process on a fault."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from executor_service.backends.forward_rows import ForwardOutputs, ForwardRows
from executor_service.backends.oracle_backend.clocked_oracle import oracle_of
from executor_service.backends.oracle_backend.oracle import OracleBackend
from executor_service.backends.oracle_backend.settings import OracleSettings
from executor_service.contract.plan import (
    Opening,
    Reason,
    Release,
    RequestRefused,
    Sampling,
    StepPlan,
    StepResult,
)
from executor_service.fatal import EXIT_FAULT, EXIT_MODEL
from executor_service.steps.worker import DeviceWorker
from tests.support.checkout import ROOT
from tests.unit.executor.deferred import DeferredBackend, DeferredForward
from tests.unit.executor.fakes import continuation, limits
from tests.unit.executor.harness import Harness, opening, plan, row
from tests.unit.executor.table_grammar import VOCABULARY, TableGrammar, TableMatcher, loops


@pytest.fixture
async def worker() -> AsyncIterator[DeviceWorker]:
    worker = DeviceWorker(max_queued=8, tick_s=0.01)
    await worker.start(lambda: Harness().engine)
    yield worker
    assert worker.stop(5)


class Gate:
    """A job that runs until it is opened."""

    def __init__(self) -> None:
        self.entered, self._open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self._open.wait(60)

    def open(self) -> None:
        self._open.set()


async def test_jobs_run_in_order_on_one_thread_that_is_not_the_loops(worker: DeviceWorker) -> None:
    seen: list[tuple[int, int]] = []

    def note(i: int) -> None:
        seen.append((i, threading.get_ident()))

    jobs = [worker.submit(partial(note, i)) for i in range(5)]
    await asyncio.gather(*jobs)
    assert [i for i, _ in seen] == list(range(5))
    assert {thread for _, thread in seen} != {threading.get_ident()}
    assert len({thread for _, thread in seen}) == 1


async def test_a_refusal_reaches_its_client_and_the_thread_goes_on(worker: DeviceWorker) -> None:
    def refuse() -> None:
        raise RequestRefused(Reason.CACHE, "no")

    with pytest.raises(RequestRefused):
        await worker.submit(refuse)
    assert await worker.submit(lambda: 5) == 5


async def test_the_queue_is_bounded(worker: DeviceWorker) -> None:
    gate = Gate()
    running = worker.submit(gate)
    await asyncio.to_thread(gate.entered.wait, 10)
    jobs = [worker.submit(lambda: None) for _ in range(8)]
    assert worker.queued == 8
    with pytest.raises(RequestRefused, match="queued"):
        worker.submit(lambda: None)
    gate.open()
    await asyncio.gather(running, *jobs)


async def test_the_age_of_a_running_job_is_known(worker: DeviceWorker) -> None:
    gate = Gate()
    running = worker.submit(gate)
    await asyncio.to_thread(gate.entered.wait, 10)
    first = worker.busy_s
    assert worker.busy_s > first > 0
    gate.open()
    await running
    assert worker.busy_s == 0


async def test_what_is_queued_renews_its_lease_before_leases_expire() -> None:
    """A step that waited after a long one must not find its session gone."""
    harness, gate = Harness(), Gate()
    engine = harness.engine
    worker = DeviceWorker(tick_s=0.01)
    await worker.start(lambda: engine)
    session = (await worker.submit(lambda: engine.open_session(0, 1000, ""))).id
    running = worker.submit(gate)
    await asyncio.to_thread(gate.entered.wait, 10)
    queued = worker.submit(lambda: harness.step(opening(1, [1]), session=session), session)
    harness.clock.now_s = 100.0
    gate.open()
    await running
    assert (await queued).rows[0].refusal is None
    assert worker.stop(5)


async def test_an_idle_worker_lets_leases_expire(worker: DeviceWorker) -> None:
    harness = Harness()
    idle = DeviceWorker(tick_s=0.01)
    await idle.start(lambda: harness.engine)
    await idle.submit(lambda: harness.step(opening(1, [1])))
    harness.clock.now_s = 100.0
    while harness.engine.store.count:
        await idle.submit(lambda: None)
    assert idle.stop(5)


async def test_the_mask_of_the_next_row_is_computed_while_nothing_else_is_to_be_done() -> None:
    computed = threading.Semaphore(0)

    class Told(TableGrammar):
        def matcher(self, *, alone: bool = False) -> TableMatcher:
            return ToldMatcher(self)

    class ToldMatcher(TableMatcher):
        def mask(self) -> NDArray[np.uint8]:
            computed.release()
            return super().mask()

    grammar = Told({0: {10: 1, 11: 1}, 1: {12: 0}}, ends=set())
    harness = Harness(limits(vocab_size=VOCABULARY), OracleBackend())
    worker = DeviceWorker(tick_s=0.01)
    await worker.start(lambda: harness.engine)
    first = Opening(1, np.array(PROMPT, np.int32), 3, 0, Sampling(grammar=grammar))
    await worker.submit_step(plan(first), kept=True)
    for _ in range(2):  # the opening's, and that of the row after it, which nobody has asked for
        assert await asyncio.to_thread(computed.acquire, timeout=10)
    await worker.submit_step(plan(row(1, 3)), kept=True)
    assert await asyncio.to_thread(computed.acquire, timeout=10)
    assert worker.stop(5)


async def test_a_replay_goes_on_while_nothing_else_is_to_be_done() -> None:
    grammar = loops()
    harness = Harness(limits(vocab_size=VOCABULARY), OracleBackend(), lambda: 0.001 * grammar.consumed)
    worker = DeviceWorker(tick_s=0.01)
    await worker.start(lambda: harness.engine)
    output = [11, 11] * 40
    first = Opening(1, np.array(PROMPT + output, np.int32), 3, 0, Sampling(grammar=grammar))
    _, refused = await worker.submit_step(plan(first), kept=True)
    assert refused.rows[0].refusal is not None
    while await worker.submit(lambda: grammar.consumed) < len(output):
        pass
    _, opened = await worker.submit_step(plan(first), kept=True)
    assert opened.rows[0].tokens
    assert worker.stop(5)


PROMPT = [5, 6, 7]


class Device(DeferredBackend):
    """Lands a forward when told, oldest first; counts launches for a test that waits for one."""

    def __init__(self) -> None:
        super().__init__()
        self.finishing = threading.Semaphore(0)
        self.launched = threading.Semaphore(0)

    def launch(self, rows: ForwardRows) -> DeferredForward:
        forward = GatedForward(self, super().launch(rows))
        self.launched.release()
        return forward  # type: ignore[return-value]


class GatedForward:
    """Waits until its device finishes it, in whatever thread asks first."""

    def __init__(self, device: Device, forward: DeferredForward) -> None:
        self._device, self._forward, self._done, self._lock = device, forward, False, threading.Lock()

    def wait(self) -> None:
        with self._lock:
            if not self._done:
                assert self._device.finishing.acquire(timeout=10)
                self._done = True

    def outputs(self) -> ForwardOutputs:
        self.wait()
        return self._forward.outputs()


class Overlapped:
    """A worker whose engine has a device."""

    def __init__(self) -> None:
        self.device = Device()
        self.harness = Harness(backend=self.device)
        self.worker = DeviceWorker(tick_s=0.01)

    def step(self, what: StepPlan) -> asyncio.Future[tuple[StepPlan, StepResult]]:
        """Submit a step; its launch is not waited for."""
        return self.worker.submit_step(what, kept=True)

    async def launched(self) -> None:
        assert await asyncio.to_thread(self.device.launched.acquire, timeout=10)

    def finish_forward(self) -> None:
        self.device.finishing.release()


@pytest.fixture
async def overlapped() -> AsyncIterator[Overlapped]:
    case = Overlapped()
    await case.worker.start(lambda: case.harness.engine)
    yield case
    assert case.worker.stop(5)
    case.harness.engine.store.check()


async def test_a_step_is_launched_behind_one_that_is_under_way(overlapped: Overlapped) -> None:
    case = overlapped
    first = case.step(plan(opening(1, PROMPT)))
    await case.launched()
    for n in range(3, 8):
        second = case.step(plan(row(1, n)))
        await case.launched()
        assert not first.done()
        case.finish_forward()
        assert (await first)[1].rows[0].tokens == [continuation(PROMPT, n - 2)[-1]]
        assert not second.done()
        first = second
    case.finish_forward()
    await first
    assert case.worker.busy_s == 0


async def test_a_third_step_waits_for_the_first(overlapped: Overlapped) -> None:
    case = overlapped
    steps = [case.step(plan(opening(1, PROMPT) if n == 2 else row(1, n))) for n in range(2, 6)]
    await case.launched()
    await case.launched()
    assert not case.device.launched.acquire(blocking=False)
    assert case.worker.queued == 2
    case.finish_forward()
    await case.launched()
    for _ in range(3):
        case.finish_forward()
    await asyncio.gather(*steps)
    assert [step.result()[1].rows[0].kv_length for step in steps] == [3, 4, 5, 6]


async def test_another_job_runs_when_nothing_is_under_way_and_in_its_turn(overlapped: Overlapped) -> None:
    case = overlapped
    steps = [case.step(plan(opening(1, PROMPT))), case.step(plan(row(1, 3)))]
    seen: list[tuple[int, int]] = []
    job = case.worker.submit(lambda: seen.append((case.device.launches, len(case.device.unanswered))))
    behind = case.step(plan(row(1, 4)))
    for _ in range(3):
        case.finish_forward()
    await asyncio.gather(*steps, job, behind)
    assert seen == [(2, 0)]


async def test_a_refused_step_disturbs_nothing_under_way(overlapped: Overlapped) -> None:
    case = overlapped
    step = case.step(plan(opening(1, PROMPT)))
    await case.launched()
    with pytest.raises(RequestRefused):
        await case.step(plan(row(1, 3), session=99))
    assert case.worker.busy_s > 0
    assert not step.done()
    case.finish_forward()
    await step


async def test_a_step_that_was_waited_for_is_answered_before_the_one_that_waited(
    overlapped: Overlapped,
) -> None:
    case = overlapped
    first = case.step(plan(opening(1, PROMPT)))
    await case.launched()
    second = case.step(plan(row(1, 3, tokens=[1])))
    case.finish_forward()
    await first
    await case.launched()
    assert not second.done()
    case.finish_forward()
    await second


async def test_the_age_of_a_step_under_way_is_known(overlapped: Overlapped) -> None:
    case = overlapped
    step = case.step(plan(opening(1, PROMPT)))
    await case.launched()
    first = case.worker.busy_s
    assert case.worker.busy_s > first > 0
    case.finish_forward()
    await step
    assert case.worker.busy_s == 0


async def test_a_lease_begins_anew_with_the_answer(overlapped: Overlapped) -> None:
    case = overlapped
    step = case.step(plan(opening(1, PROMPT)))
    await case.launched()
    case.harness.clock.now_s = 100.0
    case.finish_forward()
    assert (await step)[1].rows[0].refusal is None
    await case.worker.submit(lambda: None)
    assert case.harness.engine.store.count == 1
    case.harness.clock.now_s = 200.0
    while case.harness.engine.store.count:
        await case.worker.submit(lambda: None)


async def test_no_finished_forward_is_missed_however_it_meets_the_next_step() -> None:
    harness = Harness(limits(context_length=512, total_pages=99), oracle_of(OracleSettings(step_ms=0.5)))
    worker = DeviceWorker(tick_s=60)  # what is missed stays so
    await worker.start(lambda: harness.engine)
    plans = [plan(opening(1, PROMPT)), *(plan(row(1, n)) for n in range(len(PROMPT), 300))]
    steps: deque[asyncio.Future[tuple[StepPlan, StepResult]]] = deque()
    async with asyncio.timeout(60):
        for one in plans:  # as the scheduler sends them: the next one when the last but one is answered
            steps.append(worker.submit_step(one, kept=True))
            if len(steps) == 2:
                assert (await steps.popleft())[1].rows[0].refusal is None
        await steps.popleft()
    assert worker.stop(5)
    harness.backend.close()


async def test_stopping_finishes_what_is_under_way() -> None:
    case = Overlapped()
    await case.worker.start(lambda: case.harness.engine)
    steps = [
        case.step(plan(opening(1, PROMPT))),
        case.step(plan(row(1, 3))),
        case.step(plan(ops=(Release((1,)),))),
    ]
    case.finish_forward()
    case.finish_forward()
    assert await asyncio.to_thread(case.worker.stop, 5)
    results = [result for _, result in await asyncio.gather(*steps)]
    assert [answer.refusal for result in results for answer in result.rows] == [None, None]
    assert case.harness.engine.store.pages.owned == 0


FAULTS = [
    ("RuntimeError('CUDA error')", EXIT_FAULT, "CUDA error"),
    ("LedgerError('page 3 is in 2 tables')", EXIT_FAULT, "page 3 is in 2 tables"),
    ("ModelError('weights.bin: too short')", EXIT_MODEL, "weights.bin: too short"),
]


@pytest.mark.parametrize(("error", "status", "text"), FAULTS)
def test_a_fault_on_the_device_thread_ends_the_process(error: str, status: int, text: str) -> None:
    program = f"""
import asyncio
from service_kit import logs
from executor_service.backends.base import ModelError
from executor_service.cache.kv_cache import LedgerError
from executor_service.steps.worker import DeviceWorker

def fail():
    raise {error}

async def main():
    logs.configure("json", "info")
    await DeviceWorker().start(fail)

asyncio.run(main())
"""
    path = f"{ROOT}{os.pathsep}{ROOT / 'clients' / 'python'}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert text in done.stderr
