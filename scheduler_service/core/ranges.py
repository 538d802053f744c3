"""`RANGES`: what each number of SamplingParams may be, for requests and for the model's own defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_UINT32_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """From `low` to `high`, both included unless `open_low`."""

    low: float
    high: float
    open_low: bool = False

    def __contains__(self, number: float) -> bool:
        """Whether the number lies within; NaN never does."""
        return self.low <= number <= self.high and not (self.open_low and number == self.low)

    def __str__(self) -> str:
        return f"{'(' if self.open_low else '['}{self.low:g}, {self.high:g}]"


RANGES: Mapping[str, Range] = {
    "temperature": Range(0, 100),
    "top_k": Range(0, _UINT32_MAX),
    "top_p": Range(0, 1, open_low=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 100, open_low=True),
    "presence_penalty": Range(-100, 100),
    "frequency_penalty": Range(-100, 100),
}
"""By the name of the field."""
