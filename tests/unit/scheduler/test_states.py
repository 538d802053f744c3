"""The transition table: what is not in it is illegal and changes nothing."""

from __future__ import annotations

import itertools

import pytest

from scheduler_service.core.account import Account
from scheduler_service.core.errors import IllegalEvent
from scheduler_service.core.sequence import LiveRequest
from scheduler_service.core.states import TABLE, State, Trigger, after
from tests.unit.scheduler.harness import make_request

PAIRS = list(itertools.product(State, Trigger))


@pytest.mark.parametrize(("state", "trigger"), [pair for pair in PAIRS if pair not in TABLE])
def test_an_illegal_event_raises_and_changes_nothing(state: State, trigger: Trigger) -> None:
    sequence = LiveRequest(make_request("a"), Account(""), 1, 4, 0.0).sequences[0]
    sequence.state = state
    with pytest.raises(IllegalEvent, match=state.value):
        sequence.happen(trigger)
    assert sequence.state is state


def test_everything_but_the_end_can_end() -> None:
    for state in State:
        if state is not State.ENDED:
            assert after(state, Trigger.END) is State.ENDED


def test_nothing_happens_to_what_has_ended() -> None:
    assert not [trigger for state, trigger in TABLE if state is State.ENDED]


def test_every_state_can_be_reached() -> None:
    assert {State.HELD, State.WAITING} | set(TABLE.values()) == set(State)
