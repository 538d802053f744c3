"""Who is let into the queue, what a refusal says, and which requests are not started any more."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.errors import NoRoom, NotReady, QuotaUsed, TooLate
from scheduler_service.core.events import Failure
from scheduler_service.core.lengths import MIN_COMPLETIONS, Lengths
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, STEP_S, Harness, make_request
from tests.unit.scheduler.simulation import Call, Simulation, StepCost

BOUNDED = CoreConfig(max_running=1, max_queued_requests=8, max_queued_tokens=400)


def fill(harness: Harness, identity: str, count: int = 100, **fields: Any) -> int:
    """Add as many as are taken; returns how many."""
    for taken in range(count):
        try:
            harness.add(make_request(f"{identity} {taken}", identity=identity, **fields))
        except NoRoom:
            return taken
    return count


def simulated(running: int = 8, **config: int) -> Simulation:
    """One whose steps take 100 ms whatever they compute, and that has seen completions of 50 tokens."""
    simulation = Simulation(
        StepCost(0.1, 0.0), places=running, config=CoreConfig(max_running=running, **config)
    )
    simulation.run([Call(at=0.0, length=50, timeout_s=1000.0) for _ in range(MIN_COMPLETIONS)])
    return simulation


# -- bounds ------------------------------------------------------------------------------------


def test_one_identity_alone_may_fill_the_queue() -> None:
    harness = Harness(FakeExecutor(CAPACITY), BOUNDED)
    assert fill(harness, "alone") == 8


def test_the_bound_is_shared_by_those_who_wait_and_nobody_admitted_is_ended() -> None:
    harness = Harness(FakeExecutor(CAPACITY), BOUNDED)
    assert fill(harness, "first") == 8
    assert fill(harness, "second") == 4
    assert fill(harness, "third") == 2
    assert not harness.failed
    with pytest.raises(QuotaUsed, match="first: 8 requests are queued; at most 2 may be while 3 identities"):
        harness.add(make_request("one more", identity="first"))
    harness.run()
    assert len(harness.finished) == 14


def test_shares_of_the_bound_are_by_weight() -> None:
    harness = Harness(FakeExecutor(CAPACITY), BOUNDED)
    fill(harness, "light", 1)
    assert fill(harness, "heavy", weight=3.0) == 6


def test_the_queue_never_holds_more_than_twice_its_bound() -> None:
    harness = Harness(FakeExecutor(CAPACITY), BOUNDED)
    fill(harness, "flood")
    taken = sum(fill(harness, str(identity), 1) for identity in range(100))
    assert taken == 8
    with pytest.raises(NoRoom, match="16 requests are queued") as refused:
        harness.add(make_request("late", identity="late"))
    assert not isinstance(refused.value, QuotaUsed)


def test_the_bound_in_tokens_is_shared_too() -> None:
    harness = Harness(FakeExecutor(CAPACITY), BOUNDED)
    assert fill(harness, "first", prompt=range(100)) == 4
    assert fill(harness, "second", prompt=range(100)) == 2
    with pytest.raises(QuotaUsed, match="tokens are queued") as refused:
        harness.add(make_request("more", range(100), identity="second"))
    assert (refused.value.identity, refused.value.limit) == ("second", "queued tokens")


def test_an_identity_can_be_bounded_further() -> None:
    config = CoreConfig(max_running=1, max_queued_requests=8, max_queued_requests_per_identity=3)
    harness = Harness(FakeExecutor(CAPACITY), config)
    assert fill(harness, "alone") == 3
    assert fill(harness, "other") == 3


def test_room_is_looked_at_before_the_prompt_is_known() -> None:
    harness = Harness(FakeExecutor(CAPACITY), BOUNDED, connect=False)
    with pytest.raises(NotReady):
        harness.core.check_room("flood", 0.0)
    harness.ready()
    harness.core.check_room("flood", 0.0)
    fill(harness, "flood")
    with pytest.raises(NoRoom):
        harness.core.check_room("flood", 0.0)
    harness.core.check_room("polite", 0.0)
    assert harness.core.snapshot().waiting == 8


def test_refusals_count_for_the_identity() -> None:
    harness = Harness(FakeExecutor(CAPACITY), BOUNDED)
    fill(harness, "flood")
    account = harness.core._pool.queue.account("flood")
    assert account is not None
    assert (account.taken, account.refused) == (8, 1)
    assert harness.core.snapshot().counters.refused == 1


# -- deadlines -----------------------------------------------------------------------------------


def test_a_cap_is_no_prediction() -> None:
    simulation = simulated()
    start = simulation.now
    calls = [Call(at=start, length=50, timeout_s=10.0, max_tokens=4096) for _ in range(8)]
    simulation.run(calls)
    assert all(call.finished_at for call in calls)


def test_who_would_get_its_first_token_late_is_refused_at_once_with_the_wait_there_is() -> None:
    simulation = simulated()
    start = simulation.now
    queue = [Call(at=start, length=50, timeout_s=None) for _ in range(24)]
    late = Call(at=start + 1.0, length=50, timeout_s=6.0)
    simulation.run([*queue, late])
    assert isinstance(late.refused, TooLate)
    assert late.refused.limit == "deadline"
    waited = queue[-1].first_token_s  # what it would have waited, and more
    assert waited / 2 <= late.refused.retry_after_s <= waited * 2


def test_who_would_end_late_is_refused_while_requests_compete_and_tried_otherwise() -> None:
    simulation = simulated()
    start = simulation.now
    alone = Call(at=start + 1.0, length=50, timeout_s=4.0)
    simulation.run([Call(at=start, length=50), alone])
    assert alone.refused is None
    start = simulation.now
    queue = [Call(at=start, length=50) for _ in range(9)]
    competing = Call(at=start + 2.0, length=50, timeout_s=4.0)
    simulation.run([*queue, competing])
    assert isinstance(competing.refused, TooLate)


def test_before_anything_was_seen_everybody_is_tried() -> None:
    simulation = Simulation(StepCost(0.1, 0.0), places=2, config=CoreConfig(max_running=2))
    calls = [Call(at=0.0, length=50, timeout_s=1.0) for _ in range(6)]
    simulation.run(calls)
    assert not any(call.refused for call in calls)


def test_whose_turn_comes_too_late_is_ended_instead_of_started() -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_step_tokens=8, prefill_chunk_tokens=8))
    harness.add(make_request("busy", max_tokens=30))
    harness.step()
    harness.add(make_request("late", range(40), deadline=harness.now + 6 * STEP_S))
    harness.now += 4 * STEP_S
    harness.step()
    assert harness.failed["late"].failure is Failure.DEADLINE
    assert not harness.failed["late"].emitted
    assert harness.now < 12 * STEP_S  # before its deadline
    harness.run()


@pytest.mark.parametrize("how", ["cancelled", "deadline", "lost"])
def test_time_in_which_nobody_could_be_started_teaches_no_wait(how: str) -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_running=1, failover_timeout_s=1e6))
    harness.add(make_request("runs"))
    harness.add(make_request("waits", deadline=harness.now + 2 * STEP_S if how == "deadline" else None))
    harness.step()
    if how == "cancelled":
        harness.cancel("waits")
    elif how == "lost":
        harness.lose()
    else:
        harness.run()
    harness.now += 3600.0
    if how == "lost":
        harness.ready()
    harness.run()
    harness.add(make_request("runs again", max_tokens=20))
    harness.step()
    harness.add(make_request("waits again"))
    harness.add(make_request("asks", deadline=harness.now + 60.0))
    harness.run()
    assert ("asks", 0) in harness.finished


def test_predicted_and_actual_waits_are_counted() -> None:
    simulation = simulated()
    before = simulation.core.snapshot().counters
    simulation.run([Call(at=simulation.now, length=50) for _ in range(64)])
    after = simulation.core.snapshot().counters
    predicted, actual = (
        after.predicted_wait_s - before.predicted_wait_s,
        after.wait_s - before.wait_s,
    )
    assert actual > 10
    assert actual / 2 <= predicted <= actual * 2


class Hog(Simulation):
    """One identity keeps more requests live than there are places, all long and without deadlines."""

    def follow(self, call: Call) -> Call | None:
        return (
            Call(at=self.now + 1e-3, length=call.length, identity="hog") if call.identity == "hog" else None
        )


def test_what_others_ask_for_shuts_no_newcomer_out() -> None:
    simulation = Hog(StepCost(0.05, 0.0), places=8, config=CoreConfig(max_running=8))
    hog = [Call(at=0.0, length=400, identity="hog") for _ in range(12)]
    new = [Call(at=200.0 + i, length=5, timeout_s=5.0, identity="new") for i in range(60)]
    simulation.run([*hog, *new], until=300.0)
    assert all(call.finished_at for call in new)


def test_an_identity_is_not_held_to_its_past_for_ever() -> None:
    simulation = Hog(StepCost(0.05, 0.0), places=8, config=CoreConfig(max_running=8))
    hog = [Call(at=0.0, length=400, identity="hog") for _ in range(12)]
    past = [Call(at=10.0, length=400, identity="changed") for _ in range(MIN_COMPLETIONS)]
    changed = [Call(at=500.0 + i, length=5, timeout_s=5.0, identity="changed") for i in range(200)]
    simulation.run([*hog, *past, *changed], until=720.0)
    assert all(call.finished_at for call in past)
    assert isinstance(changed[1].refused, TooLate)
    assert sum(call.finished_at is not None for call in changed) >= 2


def test_trials_are_few_however_many_identities_there_are() -> None:
    simulation = Hog(StepCost(0.05, 0.0), places=8, config=CoreConfig(max_running=8))
    hog = [Call(at=1.7 * i, length=400, identity="hog") for i in range(12)]
    crowd = [Call(at=205.0, length=400, timeout_s=5.0, identity=str(i)) for i in range(100)]
    simulation.run([*hog, *crowd], until=215.0)
    assert sum(call.refused is None for call in crowd) == 1


# -- lengths -------------------------------------------------------------------------------------


def test_the_quantile_is_of_the_last_completions() -> None:
    lengths = Lengths(10)
    for tokens in range(1, 101):
        lengths.observe(tokens)
    assert lengths.quantile(0.0) == 91
    assert lengths.quantile(0.5) == 96
    assert lengths.quantile(0.5, beyond=97) == 99
    assert lengths.quantile(0.5, beyond=100) is None


def test_little_is_not_enough_to_predict() -> None:
    lengths = Lengths(100)
    for _ in range(MIN_COMPLETIONS - 1):
        lengths.observe(3)
    assert not lengths.suffice
    lengths.observe(3)
    assert lengths.suffice


def test_a_server_that_lets_everybody_down_finds_out() -> None:
    simulation = Simulation(StepCost(0.01, 2e-3), places=64)
    calls = [Call(at=0.5 * i, length=60, timeout_s=4.0) for i in range(60) for _ in range(20)]
    simulation.run(calls)
    late = [call for call in calls if call.at > 15.0]
    done = [call for call in late if call.finished_at is not None]
    begun = [call for call in late if call.first_token_at is not None]
    assert len(done) > 20
    assert len(done) > 0.8 * len(begun)
