"""The transition table: what is not in it is illegal and changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from scheduler_service.core.account import Account
from scheduler_service.core.errors import IllegalEvent
from scheduler_service.core.sequence import LiveRequest, LiveSequence
from scheduler_service.core.states import TABLE, SequenceState, Trigger, after
from tests.unit.scheduler.harness import make_request

PAIRS = list(itertools.product(SequenceState, Trigger))


@pytest.mark.parametrize(("state", "trigger"), [pair for pair in PAIRS if pair not in TABLE])
def test_an_illegal_event_raises_and_changes_nothing(state: SequenceState, trigger: Trigger) -> None:
    sequence = LiveRequest(make_request("a"), Account(""), 1, 4, 0.0).sequences[0]
    sequence.state = state
    with pytest.raises(IllegalEvent, match=state.value):
        sequence.happen(trigger)
    assert sequence.state is state


EVENTS: dict[Trigger, Callable[[LiveSequence], object]] = {
    Trigger.OPEN: lambda sequence: sequence.open(9, 1.0),
    Trigger.CHUNK: lambda sequence: sequence.advance(2),
    Trigger.SAMPLE: lambda sequence: sequence.prefill(1.0),
}


@pytest.mark.parametrize("trigger", EVENTS)
def test_a_sequence_refuses_what_the_table_does_not_allow_and_is_as_before(trigger: Trigger) -> None:
    for state in SequenceState:
        sequence = LiveRequest(make_request("a"), Account(""), 1, 4, 0.0).sequences[0]
        sequence.state = state
        before = [getattr(sequence, name) for name in LiveSequence.__slots__]
        if (state, trigger) in TABLE:
            EVENTS[trigger](sequence)
            assert sequence.state is TABLE[state, trigger]
            continue
        with pytest.raises(IllegalEvent):
            EVENTS[trigger](sequence)
        assert [getattr(sequence, name) for name in LiveSequence.__slots__] == before


def test_a_sequence_without_its_cache_is_as_if_it_had_never_had_one() -> None:
    fresh, used = (LiveRequest(make_request("a"), Account(""), 1, 4, 0.0).sequences[0] for _ in range(2))
    used.open(5, 0.0)
    used.fork(used, 2, shares_tail=True)
    used.send_row()
    used.send_decode()
    used.drop_cache()
    lasting = {"live", "tokens", "state", "started_at", "wait"}
    for name in set(LiveSequence.__slots__) - lasting:
        assert getattr(used, name) == getattr(fresh, name), name


def test_everything_but_the_end_can_end() -> None:
    for state in SequenceState:
        if state is not SequenceState.ENDED:
            assert after(state, Trigger.END) is SequenceState.ENDED


def test_nothing_happens_to_what_has_ended() -> None:
    assert not [trigger for state, trigger in TABLE if state is SequenceState.ENDED]


def test_every_state_can_be_reached() -> None:
    assert {SequenceState.HELD, SequenceState.QUEUED} | set(TABLE.values()) == set(SequenceState)
