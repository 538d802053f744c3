"""Clients that leave: what they sent ends before it begins or between two forwards, or is done and kept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from executor_service.backends.base import Backend, ForwardRow, RowOutput
from executor_service.contract.plan import Abandoned, Reason, Release, RequestRefused, StepPlan, StepResult
from executor_service.runtime.warmup import warm_up
from executor_service.steps.worker import DeviceWorker
from tests.support.engine_steps import run
from tests.unit.executor.deferred import DeferredBackend
from tests.unit.executor.fakes import FakeBackend, continuation, ids, limits
from tests.unit.executor.harness import Harness, opening, plan, row

LONG = list(range(20, 40))
PIECE = 4
Future = asyncio.Future[tuple[StepPlan, StepResult]]


class Gated(FakeBackend):
    """Each forward waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.gate = threading.Semaphore(0), threading.Semaphore(0)

    def forward(self, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        self.entered.release()
        assert self.gate.acquire(timeout=10)
        return super().forward(rows)


class GatedDevice(DeferredBackend):
    """The same, of a device that computes by itself: it is waited for at the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.gate = threading.Semaphore(0), threading.Semaphore(0)

    def compute(self, rows: list[ForwardRow]) -> list[RowOutput]:
        self.entered.release()
        assert self.gate.acquire(timeout=10)
        return super().compute(rows)


class Case:
    """A worker over a gated backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.harness = Harness(limits(max_piece_tokens=PIECE), backend)
        self.engine = self.harness.engine
        self.worker = DeviceWorker(max_queued=8, tick_s=0.01)
        self.session = 0

    async def start(self) -> None:
        await self.worker.start(lambda: self.engine)
        self.session = (await self.worker.submit(lambda: self.engine.open_session(0, 0, ""))).id

    def step(self, what: StepPlan, *, kept: bool = False) -> Future:
        """As a unary RPC submits a step; `kept`: as a stream does."""
        return self.worker.submit_step(what, kept=kept)

    def numbered(self, step_id: int, *items: object) -> StepPlan:
        return plan(*items, session=self.session, step_id=step_id, digest=b"step %d" % step_id)  # type: ignore[arg-type]

    async def entered(self) -> None:
        """A forward has begun."""
        assert await asyncio.to_thread(self.backend.entered.acquire, timeout=10)  # type: ignore[attr-defined]

    def let_go(self, forwards: int = 1) -> None:
        self.backend.gate.release(forwards)  # type: ignore[attr-defined]

    async def forwards(self) -> int:
        """How many have been computed when all that was submitted is through."""
        await self.worker.submit(lambda: None)
        return len(self.backend.forwards)  # type: ignore[attr-defined]


@pytest.fixture
async def case() -> AsyncIterator[Case]:
    case = Case(Gated())
    await case.start()
    yield case
    case.let_go(99)
    assert case.worker.stop(5)
    case.engine.store.check()


async def test_a_job_cancelled_before_it_begins_is_not_done_unless_it_is_kept(case: Case) -> None:
    running = case.step(plan(opening(1, [1])))
    await case.entered()
    done: list[str] = []
    for kept in (False, True):
        case.worker.submit(lambda kept=kept: done.append(f"{kept=}"), kept=kept).cancel()  # type: ignore[misc]
    case.let_go()
    await running
    await case.worker.submit(lambda: None)
    assert done == ["kept=True"]


async def test_a_step_cancelled_before_it_begins_changes_nothing(case: Case) -> None:
    running = case.step(plan(opening(1, [1])))
    await case.entered()
    left = case.step(plan(row(1, 1), opening(2, LONG), ops=(Release((1,)),)))
    op = case.step(plan(ops=(Release((1,)),)))
    left.cancel()
    op.cancel()
    case.let_go()
    await running
    assert await case.forwards() == 1
    assert case.engine.store.count == 1
    assert case.engine.counters.steps_abandoned == 2


async def test_a_step_cancelled_while_it_is_computed_ends_with_its_piece(case: Case) -> None:
    """Another client waits for that piece and no more, and finds nothing of the step."""
    left = case.step(plan(opening(1, LONG)))
    await case.entered()
    other = case.step(plan(opening(2, [1, 2])))
    left.cancel()
    case.let_go(2)
    assert (await other)[1].rows[0].tokens == continuation([1, 2], 1)
    assert case.backend.forwards == [[PIECE], [2]]  # type: ignore[attr-defined]
    assert case.engine.store.count == 1


async def test_it_ends_between_any_two_pieces(case: Case) -> None:
    for pieces in range(1, 5):
        left = case.step(plan(opening(1, LONG)))
        for _ in range(pieces - 1):
            await case.entered()
            case.let_go()
        await case.entered()
        left.cancel()
        case.let_go()
        await case.worker.submit(lambda: None)
        case.engine.store.check()
        assert case.engine.store.count == 0
    assert await case.forwards() == 1 + 2 + 3 + 4


async def test_a_step_cancelled_in_its_last_piece_is_done_and_its_reply_kept(case: Case) -> None:
    what = case.numbered(1, opening(1, LONG))
    left = case.step(what)
    for _ in range(4):
        await case.entered()
        case.let_go()
    await case.entered()
    left.cancel()
    case.let_go()
    again = await case.step(what)
    assert again[1].rows[0].tokens == continuation(LONG, 1)
    assert await case.forwards() == 5


async def test_a_step_cancelled_earlier_may_be_sent_again_and_the_one_behind_it_may_not(case: Case) -> None:
    what = case.numbered(1, opening(1, LONG))
    left = case.step(what)
    behind = case.step(case.numbered(2, row(1, len(LONG))))
    await case.entered()
    left.cancel()
    case.let_go()
    with pytest.raises(RequestRefused, match="expected 1, is 2: steps are missing") as refused:
        await behind
    assert refused.value.refusal.reason is Reason.STEP_GAP
    case.let_go(6)
    assert (await case.step(what))[1].rows[0].tokens == continuation(LONG, 1)
    answer = await case.step(case.numbered(2, row(1, len(LONG))))
    assert answer[1].rows[0].tokens == continuation(LONG, 2)[1:]


async def test_a_step_is_wanted_while_one_who_replays_it_waits(case: Case) -> None:
    what = case.numbered(1, opening(1, LONG))
    first = case.step(what)
    await case.entered()
    second, third = case.step(what), case.step(what)
    first.cancel()
    second.cancel()
    case.let_go(5)
    assert (await third)[1].rows[0].tokens == continuation(LONG, 1)
    assert await case.forwards() == 5


async def test_so_it_is_before_it_begins_and_on_a_stream(case: Case) -> None:
    running = case.step(plan(opening(2, [1])))
    await case.entered()
    what = case.numbered(1, opening(1, LONG))
    first = case.step(what)
    behind = case.step(case.numbered(2, row(1, len(LONG))))
    on_stream = case.step(what, kept=True)
    first.cancel()
    on_stream.cancel()  # as when its stream is closed
    case.let_go(7)
    await running
    assert (await behind)[1].rows[0].tokens == continuation(LONG, 2)[1:]
    assert await case.forwards() == 7


async def test_it_ends_when_the_last_of_them_leaves(case: Case) -> None:
    what = case.numbered(1, opening(1, LONG))
    first = case.step(what)
    await case.entered()
    second = case.step(what)
    first.cancel()
    case.let_go()
    await case.entered()
    second.cancel()
    case.let_go()
    assert await case.forwards() == 2
    assert case.engine.store.count == 0


async def test_closing_a_stream_cancels_nothing(case: Case) -> None:
    what = case.numbered(1, opening(1, LONG))
    running = case.step(what, kept=True)
    queued = case.step(case.numbered(2, row(1, len(LONG))), kept=True)
    await case.entered()
    running.cancel()
    queued.cancel()
    case.let_go(6)
    assert await case.forwards() == 6
    assert (await case.step(what))[1].rows[0].tokens == continuation(LONG, 1)


async def test_several_steps_of_a_row_end_between_two(case: Case) -> None:
    case.let_go()
    await case.step(plan(opening(1, [1])))
    await case.entered()
    left = case.step(plan(row(1, 1, steps=9)))
    await case.entered()
    left.cancel()
    case.let_go(2)
    assert (await case.step(plan(row(1, 1))))[1].rows[0].tokens == continuation([1], 2)[1:]
    assert await case.forwards() == 3


async def test_the_session_is_closed_behind_a_step_that_was_cancelled(case: Case) -> None:
    left = case.step(case.numbered(1, opening(1, LONG)))
    await case.entered()
    closed = case.worker.submit(lambda: case.engine.close_session(case.session), kept=True)
    left.cancel()
    closed.cancel()
    case.let_go()
    assert await case.forwards() == 1
    with pytest.raises(RequestRefused, match="unknown session"):
        await case.step(case.numbered(1, opening(1, LONG)))


async def test_what_was_cancelled_takes_no_place_in_the_queue(case: Case) -> None:
    running = case.step(plan(opening(1, LONG)), kept=True)
    await case.entered()
    for future in [case.step(plan(opening(2, [1]))) for _ in range(8)]:
        future.cancel()
    with pytest.raises(RequestRefused, match="queued"):
        case.worker.submit(lambda: None)
    case.let_go()
    await case.entered()  # between two pieces they went
    assert case.worker.queued == 0
    case.let_go(4)
    await running


async def test_forward_and_warm_up_end_where_they_are(case: Case) -> None:
    worker, started, gate = case.worker, threading.Event(), threading.Semaphore(0)

    def forward_once(inputs: Sequence[object], want: frozenset[str], view: object) -> list[object]:
        started.set()
        assert gate.acquire(timeout=10)
        return [None]

    case.backend.forward_once = forward_once  # type: ignore[assignment, method-assign]
    inputs = [ids(1)] * 5
    left = worker.submit_forwards(lambda: case.engine.forward_once(inputs, frozenset()))
    await asyncio.to_thread(started.wait, 10)
    left.cancel()
    gate.release()
    warming = worker.submit_forwards(lambda: warm_up(OfAnyRows(case), limits()))  # type: ignore[arg-type]
    await case.entered()
    warming.cancel()
    case.let_go()
    assert await case.forwards() == 0
    assert not gate.acquire(blocking=False)
    with pytest.raises(Abandoned):
        run(warm_up(OfAnyRows(case), limits()), lambda: False)  # type: ignore[arg-type]


class OfAnyRows:
    """Computes nothing, at the case's gate."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def forward(self, rows: object) -> None:
        self._case.backend.entered.release()  # type: ignore[attr-defined]
        assert self._case.backend.gate.acquire(timeout=10)  # type: ignore[attr-defined]


async def test_a_step_under_way_is_answered_before_a_long_one_behind_it_is_computed() -> None:
    case = Case(GatedDevice())
    await case.start()
    ahead = case.step(plan(opening(1, [1, 2])), kept=True)
    long = case.step(plan(opening(2, LONG)), kept=True)
    await case.entered()
    case.let_go()
    assert (await ahead)[1].rows[0].tokens == continuation([1, 2], 1)
    assert not long.done()
    assert case.worker.busy_s > 0
    case.let_go(5)
    assert (await long)[1].rows[0].tokens == continuation(LONG, 1)
    assert case.worker.stop(5)
    assert case.worker.busy_s == 0


async def test_stopping_finishes_what_is_queued_and_still_wanted() -> None:
    case = Case(Gated())
    await case.start()
    left, kept = case.step(plan(opening(1, LONG))), case.step(plan(opening(2, LONG)), kept=True)
    await case.entered()
    left.cancel()
    case.let_go(6)
    assert await asyncio.to_thread(case.worker.stop, 5)
    assert (await kept)[1].rows[0].tokens == continuation(LONG, 1)
    assert case.engine.store.count == 1
