"""Three waits for each reason, made on the real core: the reason is named, and what would end it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler_service.core.states import SequenceState
from scheduler_service.core.waiting.reasons import ROUNDING_S, WaitReason
from tests.unit.scheduler.constructed_waits import LONG, WAITS, Wait, harness_of, run_one
from tests.unit.scheduler.further_waits import FURTHER_WAITS
from tests.unit.scheduler.harness import CAPACITY, make_request
from tests.unit.scheduler.room_waits import ROOM_WAITS
from tests.unit.scheduler.test_wait_accounting import Watched

ALL_WAITS = (*WAITS, *FURTHER_WAITS, *ROOM_WAITS)


def reason_of(harness: Watched, who: str) -> WaitReason:
    live = harness.core._registry.get(who)
    if live is None:
        return WaitReason.NONE
    waiting = (SequenceState.QUEUED, SequenceState.HELD)
    reasons = [harness.core._pool.waits.reason_of(s) for s in live.sequences if s.state in waiting]
    return reasons[0] if reasons else WaitReason.NONE


def is_alone(wait: Wait) -> None:
    """Nobody else waits because of it."""


def has_one_behind(wait: Wait) -> None:
    """A request of the same identity comes, which waits for what the first of the identity waits for."""
    harness = wait.harness
    live = harness.core._registry.get(wait.who)
    assert live is not None
    first = reason_of(harness, wait.who)
    harness.add(make_request("behind", identity=live.request.identity, priority=-1))
    report = harness.core.why("behind", harness.now)
    assert report is not None
    own = (WaitReason.OWN_EARLIER, WaitReason.OWN_PRIORITY)
    if report.position > 1:
        assert report.reason in own
        assert first in own or report.first_reason is first


def has_a_stranger(wait: Wait) -> None:
    """A request of another identity comes, which changes no reason before the next plan."""
    wait.harness.add(make_request("stranger", identity="stranger"))


@pytest.mark.parametrize("others", [is_alone, has_one_behind, has_a_stranger])
@pytest.mark.parametrize("make", ALL_WAITS)
def test_a_wait_has_its_reason_and_ends_when_what_it_needs_is_there(
    make: Callable[[], Wait], others: Callable[[Wait], None]
) -> None:
    wait = make()
    harness = wait.harness
    others(wait)
    assert reason_of(harness, wait.who) is wait.reason
    harness.now += 0.5
    report = harness.core.why(wait.who, harness.now)
    assert report is not None
    assert report.reason is wait.reason
    sums = dict(report.queue_waits)
    for reason, seconds in report.preempted_waits:
        sums[reason] = sums.get(reason, 0.0) + seconds
    assert sums[wait.reason] >= 0.5 - ROUNDING_S
    wait.end()
    while harness.unanswered:
        harness.answer()
    harness.step()
    if others is not has_a_stranger:  # else it may be the stranger's turn
        assert reason_of(harness, wait.who) is not wait.reason
    harness.compares = False
    harness.run()
    harness.judge()  # its sums are the time that it waited


def test_there_are_three_waits_for_each_reason_of_the_core() -> None:
    counts = Counter(make().reason for make in ALL_WAITS)
    in_core = [reason for reason in WaitReason if reason > WaitReason.GRAMMAR_COMPILING]
    assert {reason: counts[reason] for reason in in_core if counts[reason] < 3} == {}


def test_each_of_many_that_wait_side_by_side_has_its_own_reason() -> None:
    harness = harness_of(replace(CAPACITY, max_adapter_slots=1), max_running=2, max_step_tokens=16)
    run_one(harness, adapter=b"one", identity="x")
    harness.add(make_request("long", range(60), max_tokens=LONG, n=2, identity="y"))
    harness.step()
    harness.add(make_request("slot", adapter=b"two", identity="z"))
    for identity in "vw":
        harness.add(make_request(f"{identity}-low", identity=identity))
        harness.add(make_request(f"{identity}-high", identity=identity, priority=1))
        harness.add(make_request(f"{identity}-later", identity=identity, priority=1))
    harness.step()
    found = {name: reason_of(harness, name) for name in harness.requests}
    head = harness.core._pool.waits.head
    assert head is not None
    [turn] = {"v-high", "w-high"} - {head.live.request.id}
    assert found.pop(head.live.request.id) in (WaitReason.OTHER_PROMPT, WaitReason.SEATS)
    assert found.pop(turn) is WaitReason.OTHER_TURN
    assert found == {
        "a": WaitReason.NONE,
        "long": WaitReason.PREFIX,
        "slot": WaitReason.ADAPTER_SLOT,
        **dict.fromkeys(("v-low", "w-low"), WaitReason.OWN_PRIORITY),
        **dict.fromkeys(("v-later", "w-later"), WaitReason.OWN_EARLIER),
    }
    harness.compares = False
    harness.run()
    assert harness.judge() >= {WaitReason.ADAPTER_SLOT, WaitReason.OWN_PRIORITY, WaitReason.OWN_EARLIER}
