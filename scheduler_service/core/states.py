"""The life of a sequence, as a table. What is not in the table is illegal and changes nothing.

HELD ──QUEUE──► WAITING ──OPEN──► OPENING ──CHUNK──► PREFILLING ──SAMPLE──► RUNNING
                   ▲                 │ └────────────SAMPLE──────────────────►  │
                   └─────EVICT───────┴──────────EVICT──────┴───────EVICT───────┘
END leads from everywhere to ENDED.
"""

from __future__ import annotations

import enum

from scheduler_service.core.errors import IllegalEvent


class State(enum.Enum):
    """Where a sequence is."""

    HELD = "held"  # one of n > 1 completions, until the first has computed their prompt
    WAITING = "waiting"  # in the queue, without a cache
    OPENING = "opening"  # its cache's first row is not answered yet
    PREFILLING = "prefilling"  # has a cache; more than the last token is not computed yet
    RUNNING = "running"  # has a cache; only the last token is not computed yet
    ENDED = "ended"


class Trigger(enum.Enum):
    """What happens to a sequence."""

    QUEUE = "queue"  # its turn may come
    OPEN = "open"  # an opening or a fork is planned
    CHUNK = "chunk"  # part of its known tokens was computed
    SAMPLE = "sample"  # all of them were, and new ones came back
    EVICT = "evict"  # preempted, lost with its executor, or refused: it gives up its cache
    END = "end"  # well or badly


TABLE: dict[tuple[State, Trigger], State] = {
    (State.HELD, Trigger.QUEUE): State.WAITING,
    (State.WAITING, Trigger.OPEN): State.OPENING,
    (State.OPENING, Trigger.CHUNK): State.PREFILLING,
    (State.PREFILLING, Trigger.CHUNK): State.PREFILLING,
    (State.OPENING, Trigger.SAMPLE): State.RUNNING,
    (State.PREFILLING, Trigger.SAMPLE): State.RUNNING,
    (State.RUNNING, Trigger.SAMPLE): State.RUNNING,
    (State.OPENING, Trigger.EVICT): State.WAITING,
    (State.PREFILLING, Trigger.EVICT): State.WAITING,
    (State.RUNNING, Trigger.EVICT): State.WAITING,
    (State.HELD, Trigger.END): State.ENDED,
    (State.WAITING, Trigger.END): State.ENDED,
    (State.OPENING, Trigger.END): State.ENDED,
    (State.PREFILLING, Trigger.END): State.ENDED,
    (State.RUNNING, Trigger.END): State.ENDED,
}

WITH_CACHE = frozenset({State.OPENING, State.PREFILLING, State.RUNNING})


def after(state: State, trigger: Trigger) -> State:
    """The state that follows. Raises IllegalEvent."""
    try:
        return TABLE[state, trigger]
    except KeyError:
        raise IllegalEvent(f"{trigger.value} does not happen to a sequence that is {state.value}") from None
