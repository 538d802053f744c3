"""`ScaledNumbers`: a weight matrix as a quantized file stores it, numbers, scales and minima apart.

Loaders make it, and kernels take it: nobody else looks inside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

_ROWS_AT_ONCE = 256  # scales of every number of these are expanded at once


@dataclass(frozen=True, slots=True)
class ScaledNumbers:
    """A matrix [n, k]: `numbers[i, j] * scales[i, groups[j]]`, rounded to fp32.

    Where there are minima, the group's is added, and the sum rounded once more.
    """

    numbers: torch.Tensor  # [n, k], int8, int16 or float8_e4m3fn; less its zero point
    scales: torch.Tensor  # fp32 [n, groups of columns]
    groups: torch.Tensor  # int64 [k]: the group of each column
    minima: torch.Tensor | None = None  # as `scales`

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
        some = rows, slice(int(low), int(high) + 1)
        return replace(
            self,
            numbers=self.numbers[rows, columns],
            scales=self.scales[some],
            groups=groups - low,
            minima=None if self.minima is None else self.minima[some],
        )

    def plain(self) -> torch.Tensor:
        """The matrix, fp32 [n, k]."""
        out = torch.empty(self.shape)
        for first in range(0, len(out), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            scales = self.scales[rows] if self.by_row else self.scales[rows][:, self.groups]
            torch.mul(self.numbers[rows].float(), scales, out=out[rows])
            if self.minima is not None:
                out[rows] += self.minima[rows][:, self.groups]
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
        scaled = self.scales.abs() * largest[:, None]
        return scaled if self.minima is None else scaled + self.minima.abs()


Weight: TypeAlias = torch.Tensor | ScaledNumbers
"""The weight of a linear layer, [n, k]."""


def plain(weight: Weight) -> torch.Tensor:
    """The weight as a tensor."""
    return weight.plain() if isinstance(weight, ScaledNumbers) else weight
