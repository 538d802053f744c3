"""The reasons why a request waits: a closed list, with the numbers of scheduler.proto's WaitReason."""

from __future__ import annotations

import enum


class WaitReason(enum.IntEnum):
    """Why a sequence has no cache in an executor, and what would end that.

    The reason of a step is why it admitted no further sequence. It belongs to the *head*: the sequence that
    was next in turn.
    """

    NONE = 0  # nothing waits
    # Before the core: measured by the front end.
    CALLERS_TURN = 1
    TOKENIZING = 2
    GRAMMAR_COMPILING = 3
    # Behind others.
    OWN_EARLIER = 4
    OWN_PRIORITY = 5
    OTHER_TURN = 6
    OTHER_STEP_SHARE = 7
    OTHER_PROMPT = 8
    PREFIX = 9
    DEADLINES = 10
    ALONE = 11
    # For room.
    SEATS = 12
    PAGES = 13
    PAGES_IN_FLIGHT = 14
    RUNNING_PAGES = 15
    STEP_BUDGET = 16
    ANSWER_BYTES = 17
    ADAPTER_SLOT = 18
    # For an executor.
    EXECUTOR_SHORT = 19
    GRAMMAR_BEHIND = 20
    DRAFT_EXECUTOR = 21
    NO_EXECUTOR = 22


OWN = (WaitReason.OWN_EARLIER, WaitReason.OWN_PRIORITY)
"""A sequence waits for the first of its own identity."""
WaitTimes = tuple[tuple[WaitReason, float], ...]
"""Seconds by reason; reasons without time are left out."""


ROUNDING_S = 1e-9
"""Differences of times are rounded by less than this."""


class WaitSums:
    """Seconds waited, by reason."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds: dict[WaitReason, float] = {}

    def add(self, reason: WaitReason, seconds: float) -> None:
        """Add to a reason's sum; no change if `seconds` is what rounding leaves of 0."""
        if seconds > ROUNDING_S:
            self._seconds[reason] = self._seconds.get(reason, 0.0) + seconds

    @property
    def total(self) -> float:
        """Seconds of all reasons together."""
        return sum(self._seconds.values())

    def times(self) -> WaitTimes:
        """The sums, in the order of the reasons' numbers."""
        return tuple(sorted(self._seconds.items()))

    def __len__(self) -> int:
        return len(self._seconds)
