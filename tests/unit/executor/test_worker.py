"""The device thread: order, refusals, leaving clients, leases, and the end of the process on a fault."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator

import pytest

from executor_service.fatal import EXIT_FAULT, EXIT_MODEL
from executor_service.plan import Reason, StepRefused
from executor_service.worker import Worker
from tests.support.processes import ROOT
from tests.unit.executor.harness import Harness, opening


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker(max_queued=8, tick_s=0.01)
    await worker.start(lambda: Harness().engine)
    yield worker
    assert worker.stop(5)


class Gate:
    """A job that runs until it is opened."""

    def __init__(self) -> None:
        self.entered, self._open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self._open.wait(10)

    def open(self) -> None:
        self._open.set()


async def test_jobs_run_in_order_on_one_thread_that_is_not_the_loops(worker: Worker) -> None:
    seen: list[tuple[int, int]] = []
    jobs = [worker.submit(lambda i=i: seen.append((i, threading.get_ident()))) for i in range(5)]
    await asyncio.gather(*jobs)
    assert [i for i, _ in seen] == list(range(5))
    assert {thread for _, thread in seen} != {threading.get_ident()}
    assert len({thread for _, thread in seen}) == 1


async def test_a_refusal_reaches_its_client_and_the_thread_goes_on(worker: Worker) -> None:
    def refuse() -> None:
        raise StepRefused(Reason.NOT_FOUND, "no")

    with pytest.raises(StepRefused):
        await worker.submit(refuse)
    assert await worker.submit(lambda: 5) == 5


async def test_a_job_whose_client_left_is_done_all_the_same(worker: Worker) -> None:
    gate, done = Gate(), threading.Event()
    running = worker.submit(gate)
    waiting = worker.submit(done.set)
    waiting.cancel()
    gate.open()
    await running
    await worker.submit(lambda: None)
    assert done.is_set()


async def test_the_queue_is_bounded(worker: Worker) -> None:
    gate = Gate()
    running = worker.submit(gate)
    await asyncio.to_thread(gate.entered.wait, 10)
    jobs = [worker.submit(lambda: None) for _ in range(8)]
    assert worker.queued == 8
    with pytest.raises(StepRefused, match="queued"):
        worker.submit(lambda: None)
    gate.open()
    await asyncio.gather(running, *jobs)


async def test_the_age_of_a_running_job_is_known(worker: Worker) -> None:
    gate = Gate()
    running = worker.submit(gate)
    await asyncio.to_thread(gate.entered.wait, 10)
    first = worker.busy_s
    assert worker.busy_s > first > 0
    gate.open()
    await running
    assert worker.busy_s == 0


async def test_what_is_queued_renews_its_lease_before_leases_expire() -> None:
    """A step that waited behind a long one must not find its session gone."""
    harness, gate = Harness(), Gate()
    engine = harness.engine
    worker = Worker(tick_s=0.01)
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


async def test_an_idle_worker_lets_leases_expire(worker: Worker) -> None:
    harness = Harness()
    idle = Worker(tick_s=0.01)
    await idle.start(lambda: harness.engine)
    await idle.submit(lambda: harness.step(opening(1, [1])))
    harness.clock.now_s = 100.0
    while harness.engine.sequences:
        await idle.submit(lambda: None)
    assert idle.stop(5)


FAULTS = [
    ("RuntimeError('CUDA error')", EXIT_FAULT, "CUDA error"),
    ("LedgerError('page 3 is in 2 tables')", EXIT_FAULT, "page 3 is in 2 tables"),
    ("ModelError('weights.bin: too short')", EXIT_MODEL, "weights.bin: too short"),
]


@pytest.mark.parametrize(("error", "status", "text"), FAULTS)
def test_a_fault_on_the_device_thread_ends_the_process(error: str, status: int, text: str) -> None:
    program = f"""
import asyncio
from paceline.service import logs
from executor_service.backends.base import ModelError
from executor_service.kv_cache import LedgerError
from executor_service.worker import Worker

def fail():
    raise {error}

async def main():
    logs.configure("json", "info")
    await Worker().start(fail)

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
