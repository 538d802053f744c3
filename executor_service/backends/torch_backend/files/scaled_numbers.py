"""`ScaledNumbers`: a weight matrix as a quantized checkpoint stores it, numbers and scales apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

_ROWS_AT_ONCE = 256  # scales of every number of these are expanded at once


@dataclass(frozen=True, slots=True)
class ScaledNumbers:
    """A matrix [n, k]: `numbers[i, j] * scales[i, groups[j]]`, each product rounded to fp32."""

    numbers: torch.Tensor  # [n, k], int8, int16 or float8_e4m3fn; less its zero point
    scales: torch.Tensor  # fp32 [n, groups of columns]
    groups: torch.Tensor  # int64 [k]: the group of each column

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        n, k = self.numbers.shape
        return n, k

    @property
    def by_row(self) -> bool:
        """Whether each row has one scale."""
        return self.scales.shape[1] == 1

    @property
    def group_size(self) -> int | None:
        """Columns of a group where groups follow each other and only the last may be smaller, else None."""
        k = len(self.groups)
        size = k if self.by_row else int((self.groups == self.groups[0]).sum())
        return size if torch.equal(self.groups, torch.arange(k) // size) else None

    def part(self, rows: slice, columns: slice = slice(None)) -> ScaledNumbers:
        """Some rows and columns, and their groups; both slices have step 1."""
        groups = self.groups[columns]
        low, high = groups.aminmax()
        return ScaledNumbers(self.numbers[rows, columns], self.scales[rows, low : high + 1], groups - low)

    def plain(self) -> torch.Tensor:
        """The matrix, fp32 [n, k]."""
        out = torch.empty(self.shape)
        for first in range(0, len(out), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            scales = self.scales[rows] if self.by_row else self.scales[rows][:, self.groups]
            torch.mul(self.numbers[rows].float(), scales, out=out[rows])
        return out

    def magnitudes(self) -> torch.Tensor:
        """For each row and group of columns, at least the largest magnitude in it; NaN if a number is NaN."""
        if self.numbers.dtype.is_floating_point:
            # Magnitudes compare as their bits do, with NaN above all others.
            bits = self.numbers.view(torch.uint8) & 0x7F
            largest = bits.amax(1).view(self.numbers.dtype).float()
        else:
            low, high = self.numbers.aminmax(dim=1)
            largest = torch.maximum(high.float(), -low.float())
        return self.scales.abs() * largest[:, None]


Weight: TypeAlias = torch.Tensor | ScaledNumbers
"""The weight of a linear layer, [n, k]."""


def plain(weight: Weight) -> torch.Tensor:
    """The weight as a tensor."""
    return weight.plain() if isinstance(weight, ScaledNumbers) else weight
