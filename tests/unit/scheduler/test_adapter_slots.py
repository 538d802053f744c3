"""Which sequences wait for a slot of their adapter, who starts before them, and that none waits forever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.core.adapter_slots import MAX_OVERTAKINGS
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.errors import NeverFits
from scheduler_service.core.evaluation import Evaluation, EvaluationInput, HiddenPooling
from scheduler_service.core.snapshot import AdapterUse
from tests.unit.scheduler.engine_executor import ADAPTERS, EngineExecutor
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, Harness, make_request, solo

A, B, C, _, FOREIGN = ADAPTERS
ONE_SLOT = replace(CAPACITY, max_adapter_slots=1)
TWO_SLOTS = replace(CAPACITY, max_adapter_slots=2)


def started(harness: Harness) -> set[str]:
    """Requests that have a cache."""
    return {sequence.live.request.id for sequence in harness.core._pool.running}


def test_a_sequence_waits_for_a_slot_and_those_that_need_none_start_before_it() -> None:
    harness = Harness(EngineExecutor(ONE_SLOT))
    for name, adapter in (("a1", A), ("b1", B), ("plain", b""), ("b2", B), ("a2", A)):
        harness.add(make_request(name, adapter=adapter, max_tokens=6))
    harness.plan()
    assert started(harness) == {"a1", "plain", "a2"}
    assert harness.core.adapter_use() == {A: AdapterUse(2, 0), B: AdapterUse(0, 2)}
    harness.answer()
    harness.run()
    assert len(harness.finished) == 5
    assert harness.core.adapter_use() == {}


def test_each_sequence_is_computed_with_its_own_adapter_and_its_prefix_is_no_others() -> None:
    harness = Harness(EngineExecutor(TWO_SLOTS))
    adapters = (A, B, b"", C, A, b"", B)
    for number, adapter in enumerate(adapters):
        harness.add(make_request(str(number), range(9), adapter=adapter, max_tokens=8, n=1 + number % 2))
    harness.run()
    for number, adapter in enumerate(adapters):
        alone = solo(
            EngineExecutor(ONE_SLOT),
            make_request("solo", range(9), adapter=adapter, max_tokens=8, n=1 + number % 2),
        )
        assert {index: harness.tokens[str(number), index] for index in alone} == alone
    assert len({tuple(harness.tokens[str(number), 0]) for number in range(4)}) == 4


def starts_before(harness: Harness, waiting: str, adapter: bytes, most: int) -> int:
    """Requests of an adapter that start before `waiting` does, if there are always two that run or wait."""
    count = 0
    for _ in range(20 * most):
        while harness.core.snapshot().running + harness.core.snapshot().waiting < 3:
            harness.add(make_request(f"busy{count}", [count, 1], adapter=adapter, max_tokens=5))
            count += 1
        harness.step()
        if harness.tokens[waiting, 0]:
            return count
    raise AssertionError(f"it waits although {count} others were taken")


def test_whoever_starts_before_a_waiting_call_is_found_without_a_look_at_each_of_its_inputs() -> None:
    harness = Harness(EngineExecutor(ONE_SLOT))
    inputs = tuple(EvaluationInput((number,)) for number in range(40))
    harness.add(make_request("a", adapter=A, max_tokens=9))
    waiting = Evaluation(inputs, HiddenPooling.LAST)
    harness.add(make_request("b", (), adapter=B, n=len(inputs), evaluation=waiting))
    harness.add(make_request("plain"))
    looked_at: list[bytes] = []

    class Passed(frozenset[bytes]):
        def __contains__(self, adapter: object) -> bool:
            assert isinstance(adapter, bytes)
            looked_at.append(adapter)
            return super().__contains__(adapter)

    found = harness.core._pool.queue.next_sequence(Passed({A, B}))
    assert found is not None
    assert found.live.request.id == "plain"
    assert looked_at == [A, B, b""]


@pytest.mark.parametrize("identity", ["", "another"])
def test_a_sequence_gets_a_slot_although_requests_of_the_adapter_that_has_it_never_cease(
    identity: str,
) -> None:
    harness = Harness(EngineExecutor(ONE_SLOT))
    harness.add(make_request("first", adapter=A, max_tokens=5))
    harness.step()
    harness.add(make_request("waiting", adapter=B, identity=identity))
    count = starts_before(harness, "waiting", A, most=2 * MAX_OVERTAKINGS)
    assert MAX_OVERTAKINGS <= count <= MAX_OVERTAKINGS + 2
    harness.run()
    assert not harness.failed


def test_only_as_many_slots_are_emptied_as_adapters_wait_for_one() -> None:
    harness = Harness(EngineExecutor(TWO_SLOTS))
    for number in range(2):
        harness.add(make_request(f"long{number}", [number], adapter=ADAPTERS[number], max_tokens=100))
    harness.step()
    harness.add(make_request("waiting", adapter=C))
    for number in range(2 * MAX_OVERTAKINGS + 4):
        harness.add(make_request(f"a{number}", [number, 5], adapter=ADAPTERS[number % 2], max_tokens=2))
        for _ in range(2):
            harness.step()
    left = {request for request in started(harness) if request != "waiting"}
    assert not harness.tokens["waiting", 0]
    assert left == {"long0", "long1"}
    waiting = harness.core.adapter_use()
    assert sorted((waiting[A].waiting > 0, waiting[B].waiting > 0)) == [False, True]
    harness.run()
    assert len(harness.finished) == 2 * MAX_OVERTAKINGS + 7


def test_a_sequence_that_the_executor_has_no_slot_for_waits_and_delays_nobody() -> None:
    executor = EngineExecutor(ONE_SLOT)
    harness = Harness(executor)
    executor.squeeze(1, FOREIGN)
    harness.add(make_request("a", adapter=A))
    harness.add(make_request("plain", [4, 4], max_tokens=20))
    harness.step()
    assert started(harness) == {"plain"}
    harness.add(make_request("plain2", [5, 5], max_tokens=2))
    harness.step()
    assert "plain2" in started(harness)
    for _ in range(10):
        harness.step()
    assert not harness.tokens["a", 0]
    executor.squeeze(0)
    harness.run()
    expected = solo(EngineExecutor(ONE_SLOT), make_request("a", adapter=A))
    assert harness.tokens["a", 0] == expected[0]
    assert harness.finished["a", 0].usage.preemptions == 0


def test_an_idle_executor_without_a_slot_is_asked_again() -> None:
    executor = EngineExecutor(ONE_SLOT)
    harness = Harness(executor)
    executor.squeeze(1, FOREIGN)
    harness.add(make_request("a", adapter=A))
    harness.step()
    assert harness.core.next_wakeup(harness.now) is not None
    executor.squeeze(0)
    harness.run()
    assert ("a", 0) in harness.finished


def test_a_sequence_whose_adapter_is_not_loaded_waits_until_it_is() -> None:
    executor = EngineExecutor(ONE_SLOT)
    adapters = executor.engine.store.adapters
    adapter = adapters.find(A)
    assert adapter is not None
    adapters.remove(A.hex())
    harness = Harness(executor)
    harness.add(make_request("a", adapter=A))
    for _ in range(20):
        harness.step()
    assert not harness.failed
    adapters.add(A.hex(), adapter)
    harness.run()
    assert ("a", 0) in harness.finished


def test_an_executor_without_adapters_gets_no_sequence_with_one() -> None:
    with pytest.raises(NeverFits, match="the executor has none") as caught:
        Harness(FakeExecutor(CAPACITY)).add(make_request("a", adapter=A))
    assert caught.value.field == "model"
    harness = Harness(EngineExecutor(ONE_SLOT))
    harness.add(make_request("a", adapter=A))
    harness.lose()
    harness.executor = FakeExecutor(CAPACITY)
    harness.ready()
    assert "the executor has none" in harness.failed["a"].message


def test_a_sequence_that_must_run_alone_gets_the_slot_of_one_that_waits_for_it() -> None:
    harness = Harness(EngineExecutor(TWO_SLOTS), CoreConfig())
    for name, adapter in (("a", A), ("b", B)):
        harness.add(make_request(name, adapter=adapter, max_tokens=30))
    for _ in range(2):
        harness.plan()
        harness.lose()
        harness.ready()
    harness.lose()
    harness.executor = EngineExecutor(ONE_SLOT)
    harness.ready()
    harness.run()
    assert len(harness.finished) == 2


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_with_steps_in_flight_no_step_has_more_adapters_than_slots(in_flight: int) -> None:
    harness = Harness(EngineExecutor(TWO_SLOTS), CoreConfig(max_in_flight=in_flight))
    for number in range(20):
        harness.add(make_request(str(number), [number], adapter=ADAPTERS[number % 4], max_tokens=1 + number))
    harness.run()  # checks each plan
    assert len(harness.finished) == 20
    assert not harness.core.snapshot().counters.preemptions
