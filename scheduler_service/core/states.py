"""The life of a sequence, as a table. What is not in the table is illegal and changes nothing.

HELD ──QUEUE──► WAITING ──OPEN──► OPENING ──CHUNK──► PREFILLING ──SAMPLE──► RUNNING
                   ▲                 │ └────────────SAMPLE──────────────────►  │
                   └─────EVICT───────┴──────────EVICT──────┴───────EVICT───────┘
END leads from everywhere to ENDED.
"""

from __future__ import annotations

import enum

from scheduler_service.core.errors import IllegalEvent


class SequenceState(enum.Enum):
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


TABLE: dict[tuple[SequenceState, Trigger], SequenceState] = {
    (SequenceState.HELD, Trigger.QUEUE): SequenceState.WAITING,
    (SequenceState.WAITING, Trigger.OPEN): SequenceState.OPENING,
    (SequenceState.OPENING, Trigger.CHUNK): SequenceState.PREFILLING,
    (SequenceState.PREFILLING, Trigger.CHUNK): SequenceState.PREFILLING,
    (SequenceState.OPENING, Trigger.SAMPLE): SequenceState.RUNNING,
    (SequenceState.PREFILLING, Trigger.SAMPLE): SequenceState.RUNNING,
    (SequenceState.RUNNING, Trigger.SAMPLE): SequenceState.RUNNING,
    (SequenceState.OPENING, Trigger.EVICT): SequenceState.WAITING,
    (SequenceState.PREFILLING, Trigger.EVICT): SequenceState.WAITING,
    (SequenceState.RUNNING, Trigger.EVICT): SequenceState.WAITING,
    (SequenceState.HELD, Trigger.END): SequenceState.ENDED,
    (SequenceState.WAITING, Trigger.END): SequenceState.ENDED,
    (SequenceState.OPENING, Trigger.END): SequenceState.ENDED,
    (SequenceState.PREFILLING, Trigger.END): SequenceState.ENDED,
    (SequenceState.RUNNING, Trigger.END): SequenceState.ENDED,
}

WITH_CACHE = frozenset({SequenceState.OPENING, SequenceState.PREFILLING, SequenceState.RUNNING})


def after(state: SequenceState, trigger: Trigger) -> SequenceState:
    """The state that follows. Raises IllegalEvent."""
    try:
        return TABLE[state, trigger]
    except KeyError:
        raise IllegalEvent(f"{trigger.value} does not happen to a sequence that is {state.value}") from None
