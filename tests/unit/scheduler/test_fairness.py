"""Between identities the virtual token counter decides, within one its priorities; nobody is shut out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from scheduler_service.core.account import Account
from scheduler_service.core.admission import SURPLUS_TOKENS
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.errors import NoRoom
from scheduler_service.core.fair_queue import MAX_IDLE, FairQueue
from scheduler_service.core.preemption import LEAD
from scheduler_service.core.queue import SequenceQueue
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, Harness, make_request
from tests.unit.scheduler.simulation import Call, Simulation, StepCost, quantile

ONE_SEAT = CoreConfig(max_running=1)


def finished(harness: Harness) -> list[str]:
    return [request_id for request_id, _ in harness.finished]


def counter(harness: Harness, identity: str) -> float:
    account = harness.core._pool.queue.account(identity)
    assert account is not None
    return account.counter


def test_who_was_served_least_goes_first_however_many_came_before() -> None:
    harness = Harness(FakeExecutor(CAPACITY), ONE_SEAT)
    for i in range(6):
        harness.add(make_request(f"a{i}", identity="a"))
    harness.step()
    for i in range(2):
        harness.add(make_request(f"b{i}", identity="b"))
    harness.run()
    assert finished(harness) == ["a0", "b0", "a1", "b1", "a2", "a3", "a4", "a5"]


def test_priority_decides_within_one_identity_and_means_nothing_to_others() -> None:
    harness = Harness(FakeExecutor(CAPACITY), ONE_SEAT)
    harness.add(make_request("a", identity="a"))
    harness.add(make_request("b", identity="b"))
    harness.step()
    harness.add(make_request("a low", identity="a"))
    harness.add(make_request("a high", identity="a", priority=1000))
    harness.run()
    assert finished(harness) == ["a", "b", "a high", "a low"]


def test_weight_divides_what_is_charged() -> None:
    harness = Harness(FakeExecutor(CAPACITY), ONE_SEAT)
    for i in range(6):
        harness.add(make_request(f"a{i}", identity="a", weight=2.0))
        harness.add(make_request(f"b{i}", identity="b"))
    harness.run()
    first = finished(harness)[:6]
    assert sum(name.startswith("a") for name in first) == 4


def test_prompt_tokens_are_charged_once_and_output_twice() -> None:
    harness = Harness(FakeExecutor(replace(CAPACITY, total_pages=7)))
    harness.add(make_request("a", range(4), max_tokens=20, identity="a"))
    harness.add(make_request("b", range(9, 13), max_tokens=20, identity="b"))
    harness.run()
    assert harness.core.snapshot().counters.preemptions > 0  # what is computed again is not charged again
    assert counter(harness, "a") == counter(harness, "b") == 4 + 2 * 20


def test_cached_prompt_tokens_are_given_back() -> None:
    queue, running = FairQueue(), SequenceQueue()
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a", range(20), identity="a"))
    (sequence,) = harness.core._pool.queue
    queue._active["a"] = account = sequence.live.account
    queue.settle([sequence])
    assert account.counter == 20
    sequence.cached = 16
    queue.settle([sequence])
    assert account.counter == 4
    assert not len(running)


def test_who_returns_is_lifted_to_the_lowest_of_those_who_wait() -> None:
    harness = Harness(FakeExecutor(CAPACITY), ONE_SEAT)
    harness.add(make_request("b", identity="b"))
    harness.run()
    idle = counter(harness, "b")
    for i in range(9):
        harness.add(make_request(f"a{i}", identity="a"))
    while len(harness.finished) < 7:
        harness.step()
    harness.step()
    harness.add(make_request("b again", identity="b"))
    assert counter(harness, "b") == counter(harness, "a") > 3 * idle
    harness.run()


def test_idleness_after_more_than_its_share_is_not_rewarded() -> None:
    queue, running = FairQueue(), SequenceQueue()
    greedy = queue.enter(make_request("a", identity="a"), running)
    greedy.counter = 100.0
    queue.leave(greedy)
    assert queue.enter(make_request("b", identity="b"), running).counter == 0.0
    assert queue.enter(make_request("a", identity="a"), running).counter == 100.0


def test_accounts_of_the_idle_are_bounded() -> None:
    queue, running = FairQueue(), SequenceQueue()
    for i in range(MAX_IDLE + 10):
        queue.leave(queue.enter(make_request("r", identity=str(i)), running))
    assert queue.account("9") is None
    assert queue.account("10") is not None
    assert len(list(queue.accounts)) == MAX_IDLE


def test_requests_that_are_cancelled_again_and_again_leave_nothing_behind() -> None:
    harness = Harness(FakeExecutor(CAPACITY), ONE_SEAT)
    harness.add(make_request("running", identity="a", max_tokens=40))
    harness.step()
    harness.add(make_request("first", identity="b", max_tokens=40))  # its turn, and no place is free
    queue = harness.core._pool.queue
    for i in range(1000):
        for identity in "cd":
            harness.add(make_request(f"{identity}{i}", identity=identity))
        for identity in "cd":
            assert harness.core.cancel(f"{identity}{i}", harness.now) is not None
    first = queue.first()
    assert first is not None
    assert first.identity == "b"
    assert len(queue._turns) < 100


def test_an_identity_below_its_share_of_the_places_gets_one_at_once() -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_running=4))
    for i in range(8):
        harness.add(make_request(f"a{i}", identity="a", max_tokens=40))
    for _ in range(3):
        harness.step()
    for i in range(3):
        harness.add(make_request(f"b{i}", identity="b", max_tokens=40))
    harness.step()  # until then both were served alike
    harness.step()
    holders = [sequence.live.request.id for sequence in harness.core._pool.running]
    assert holders == ["a0", "a1", "b0", "b1"]  # half each, and the oldest stay
    harness.run()
    assert len(harness.finished) == 11


def test_an_identity_below_its_share_gets_pages_at_once() -> None:
    harness = Harness(FakeExecutor(replace(CAPACITY, total_pages=12)))
    for i in range(4):
        harness.add(make_request(f"a{i}", range(7), identity="a", max_tokens=30))
    harness.step()
    harness.add(make_request("b", range(9), identity="b", max_tokens=2))
    for _ in range(4):
        harness.step()
    assert finished(harness) == ["b"]
    harness.run()


def test_a_long_prompt_of_somebody_served_more_takes_no_tokens_from_whose_turn_it_is() -> None:
    config = CoreConfig(max_step_tokens=8, prefill_chunk_tokens=8)
    harness = Harness(FakeExecutor(CAPACITY), config)
    harness.add(make_request("first", range(60), identity="a", max_tokens=2))
    harness.step()
    harness.add(make_request("a", range(60), identity="a", max_tokens=2))
    for _ in range(8):
        harness.step()
    harness.add(make_request("b", range(3), identity="b", max_tokens=2))
    for _ in range(3):
        harness.step()
    assert finished(harness) == ["first", "b"]
    harness.run()


def test_victims_are_those_of_the_identity_that_was_served_most() -> None:
    harness = Harness(FakeExecutor(replace(CAPACITY, total_pages=8)))
    harness.add(make_request("a0", range(4), identity="a", max_tokens=14))
    harness.add(make_request("a1", range(5), identity="a", max_tokens=14))
    harness.add(make_request("b", range(6), identity="b", max_tokens=6, priority=-5))
    harness.run()
    assert harness.finished["b", 0].usage.preemptions == 0
    assert harness.finished["a1", 0].usage.preemptions > 0


def test_a_plan_does_not_look_at_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_running=2, max_queued_requests=4096))
    for i in range(1000):
        for _ in range(2):
            harness.add(make_request(f"{len(harness.requests)}", identity=str(i), max_tokens=8))
    seen = 0
    first = FairQueue.first

    def counted(queue: FairQueue) -> Account | None:
        nonlocal seen
        seen += 1
        return first(queue)

    def never(queue: FairQueue) -> Iterator[object]:
        raise AssertionError("somebody looks at all that wait")

    monkeypatch.setattr(FairQueue, "first", counted)
    monkeypatch.setattr(FairQueue, "__iter__", never)
    core = harness.core
    plan = core.plan(0.0)
    assert plan is not None
    core.apply(harness.executor.execute(plan), 0.1)
    core.cancel("1500", 0.1)
    assert core.plan(0.1) is not None
    core.snapshot()
    assert seen <= 6


def test_who_comes_with_nothing_running_goes_before_whom_it_is_lifted_to() -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_running=2))
    for i in range(4):
        harness.add(make_request(f"flood {i}", identity="flood"))
    harness.step()
    harness.add(make_request("polite", identity="polite"))
    assert counter(harness, "polite") == counter(harness, "flood")
    plan = harness.core.plan(harness.now)
    assert plan is not None
    polite = harness.core._pool.queue.account("polite")
    assert polite is not None
    assert polite.running == 1  # in the very next step: a request of the flood has given way


class Polite(Simulation):
    """Closed-loop clients: each sends its next request a while after its last one has ended."""

    def follow(self, call: Call) -> Call | None:
        if not call.identity.startswith("polite") or self.now > 40.0:
            return None
        return replace(call, at=self.now + 0.3, first_token_at=None, finished_at=None, refused=None)


def polite_p99(clients: int, flood: int, streams: int, places: int) -> float:
    """p99 of the polite clients' times to the first token, beside one who sends `flood` requests at once."""
    config = CoreConfig(max_running=places)
    simulation = Polite(cost=StepCost(0.02, 1e-4), config=config)
    calls = [
        Call(at=0.01 * i, length=80 + 7 * i % 40, prompt=64, identity=f"polite {i % clients}")
        for i in range(streams * clients)
    ]
    calls += [Call(at=0.5, length=100, prompt=64, identity="flood") for _ in range(flood)]
    simulation.run(sorted(calls, key=lambda call: call.at), until=45.0)
    waits = [
        call.first_token_s
        for call in simulation.calls
        if call.identity.startswith("polite") and 1.0 < call.at < 40.0
    ]
    assert not any(call.refused for call in simulation.calls if call.identity != "flood")
    assert len(waits) > 50
    return quantile(waits, 0.99)


@pytest.mark.parametrize(
    ("streams", "places"),
    [
        pytest.param(1, 64, id="few places", marks=pytest.mark.slow),
        pytest.param(5, 64, id="most places"),
        pytest.param(3, 32, id="all but two places", marks=pytest.mark.slow),
    ],
)
def test_who_floods_with_ten_thousand_requests_does_not_delay_ten_polite_ones(
    streams: int, places: int
) -> None:
    alone, beside = polite_p99(11, 0, streams, places), polite_p99(10, 10_000, streams, places)
    assert beside <= 1.5 * alone


def test_an_identity_that_was_served_much_more_gives_way_within_its_share() -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_running=4))
    for identity in "ab":
        for i in range(4):
            harness.add(make_request(f"{identity}{i}", identity=identity, max_tokens=40))
    harness.step()
    pool = harness.core._pool
    assert sorted(s.live.request.id for s in pool.running) == ["a0", "a1", "b0", "b1"]
    account = pool.queue.account("a")
    assert account is not None
    account.counter += 2 * LEAD
    harness.step()
    assert sorted(s.live.request.id for s in pool.running) == ["a0", "b0", "b1", "b2"]
    harness.run()
    assert len(harness.finished) == 8


def test_beside_others_who_holds_more_than_its_share_starts_few_tokens_a_step() -> None:
    roomy = replace(CAPACITY, total_pages=500, max_step_tokens=1000)
    harness = Harness(FakeExecutor(roomy), CoreConfig(max_step_tokens=1000, max_running=8, step_budget_s=60))
    harness.add(make_request("polite", identity="polite", max_tokens=50))
    harness.step()
    for i in range(8):
        harness.add(make_request(f"flood {i}", range(SURPLUS_TOKENS // 2), identity="flood", max_tokens=50))
    started = []
    for _ in range(4):
        before = harness.core.snapshot().running
        harness.step()
        started.append(harness.core.snapshot().running - before)
    assert started == [4, 2, 1, 0]  # its share of the places at once, the others little by little


def test_who_floods_leaves_room_in_the_queue_for_others() -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_running=1, max_queued_requests=64))
    refused = 0
    for i in range(1000):
        try:
            harness.add(make_request(f"flood {i}", identity="flood"))
        except NoRoom:
            refused += 1
    assert refused == 1000 - 64
    for i in range(10):
        harness.add(make_request(f"polite {i}", identity=f"polite {i}"))
    with pytest.raises(NoRoom):
        harness.add(make_request("flood", identity="flood"))
