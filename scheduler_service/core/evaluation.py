"""What a request asks of given texts in place of output: their scores, or a vector of each."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_service.core.shared_prefixes import Shared, leaders


class HiddenPooling(enum.Enum):
    """Which hidden state stands for an input."""

    LAST = "last"  # of its last token
    MEAN = "mean"  # the mean over all its tokens


@dataclass(frozen=True, slots=True)
class EvaluationInput:
    """One text of an evaluation."""

    tokens: Sequence[int]  # never changed
    scored_from: int = 0  # position of the first token with a score, at least 1; 0 with pooling


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All inputs of a call. Each has its tokens scored, or with `pooling` a vector instead."""

    inputs: tuple[EvaluationInput, ...]  # at least one
    pooling: HiddenPooling | None = None

    @property
    def tokens(self) -> int:
        """Of all inputs together."""
        return sum(len(one.tokens) for one in self.inputs)

    @property
    def longest(self) -> int:
        """Tokens of the longest input."""
        return max(len(one.tokens) for one in self.inputs)

    def leaders(self) -> list[Shared | None]:
        """For each input, another one that is computed before it, for their common prefix.

        Only the part of an input that may come from the prefix cache counts: nothing of it with
        HiddenPooling.MEAN, and nothing after the first scored token but one.
        """
        if len(self.inputs) < 2 or self.pooling is HiddenPooling.MEAN:
            return [None] * len(self.inputs)
        usable = [(one.scored_from or len(one.tokens)) - 1 for one in self.inputs]
        return leaders([packed_ids(one.tokens) for one in self.inputs], usable)

    def misfit(self, max_tokens: int) -> tuple[str, str] | None:
        """The field of an input that does not fit into a context of `max_tokens`, and why; None: all fit."""
        for index, one in enumerate(self.inputs):
            if not one.tokens:
                return f"inputs[{index}]", "is empty"
            if self.pooling is None and not 1 <= one.scored_from < len(one.tokens):
                return f"inputs[{index}]", "has no token to be scored"
            if len(one.tokens) > max_tokens:
                return f"inputs[{index}]", f"has {len(one.tokens)} tokens; at most {max_tokens} fit"
        return None


def packed_ids(ids: Sequence[int]) -> bytes:
    """Each id as 4 bytes, little-endian: 0.6 ms for 131,072 ids of a tuple."""
    return np.array(array("I", ids), "<u4").tobytes()  # numpy alone takes four times as long for a tuple
