"""The states of a sequence and the transitions between them. Any other transition is illegal.

HELD ◄──HOLD─── QUEUED
HELD ──QUEUE──► QUEUED ──OPEN──► OPENING ──CHUNK──► PREFILLING ──SAMPLE──► RUNNING
                   ▲                 │ └────────────SAMPLE──────────────────►  │
                   └─────EVICT───────┴──────────EVICT──────┴───────EVICT───────┘
END leads from everywhere to ENDED.
"""

from __future__ import annotations

import enum

from scheduler_service.core.errors import IllegalEvent


class SequenceState(enum.Enum):
    """The state of a sequence."""

    HELD = "held"  # without a cache, until another one has computed what both have in common
    QUEUED = "queued"  # without a cache, until its turn comes
    OPENING = "opening"  # its cache's first row is not answered yet
    PREFILLING = "prefilling"  # has a cache; more than the last token is not computed yet
    RUNNING = "running"  # has a cache; only the last token is not computed yet
    ENDED = "ended"


class Trigger(enum.Enum):
    """An event that changes the state of a sequence."""

    HOLD = "hold"  # another one is computing the beginning of its prompt
    QUEUE = "queue"  # it need not be held any longer
    OPEN = "open"  # its opening or fork is planned
    CHUNK = "chunk"  # a part of its known tokens was computed
    SAMPLE = "sample"  # all of its known tokens were computed, and new ones sampled
    EVICT = "evict"  # it lost its cache: preempted, refused, or lost with the executor
    END = "end"  # finished or failed


TABLE: dict[tuple[SequenceState, Trigger], SequenceState] = {
    (SequenceState.QUEUED, Trigger.HOLD): SequenceState.HELD,
    (SequenceState.HELD, Trigger.QUEUE): SequenceState.QUEUED,
    (SequenceState.QUEUED, Trigger.OPEN): SequenceState.OPENING,
    (SequenceState.OPENING, Trigger.CHUNK): SequenceState.PREFILLING,
    (SequenceState.PREFILLING, Trigger.CHUNK): SequenceState.PREFILLING,
    (SequenceState.OPENING, Trigger.SAMPLE): SequenceState.RUNNING,
    (SequenceState.PREFILLING, Trigger.SAMPLE): SequenceState.RUNNING,
    (SequenceState.RUNNING, Trigger.SAMPLE): SequenceState.RUNNING,
    (SequenceState.OPENING, Trigger.EVICT): SequenceState.QUEUED,
    (SequenceState.PREFILLING, Trigger.EVICT): SequenceState.QUEUED,
    (SequenceState.RUNNING, Trigger.EVICT): SequenceState.QUEUED,
    (SequenceState.HELD, Trigger.END): SequenceState.ENDED,
    (SequenceState.QUEUED, Trigger.END): SequenceState.ENDED,
    (SequenceState.OPENING, Trigger.END): SequenceState.ENDED,
    (SequenceState.PREFILLING, Trigger.END): SequenceState.ENDED,
    (SequenceState.RUNNING, Trigger.END): SequenceState.ENDED,
}

WITH_CACHE = frozenset({SequenceState.OPENING, SequenceState.PREFILLING, SequenceState.RUNNING})


def after(state: SequenceState, trigger: Trigger) -> SequenceState:
    """The state after the trigger. Raises IllegalEvent."""
    try:
        return TABLE[state, trigger]
    except KeyError:
        raise IllegalEvent(f"{trigger.value} does not happen to a sequence that is {state.value}") from None
