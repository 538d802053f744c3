"""What rank 0's `DeviceRunner` tells the others': one of these, then numbers, all int32."""

from __future__ import annotations

from enum import IntEnum


class RankMessage(IntEnum):
    """What to repeat."""

    STEP = 0  # of `StepNumbers.pack`
    LATE = 1  # logits of the last step's tokens, see `LatePicks.repeat`
    CAPTURE = 2  # rows and tokens, see `DeviceRunner.capture`
