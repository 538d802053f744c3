"""`ScaledNumbers`: a weight matrix as a quantized checkpoint stores it, numbers and scales apart."""

from __future__ import annotations

from dataclasses import dataclass

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

    def part(self, rows: slice, columns: slice = slice(None)) -> ScaledNumbers:
        """Some rows and columns; both slices have step 1."""
        return ScaledNumbers(self.numbers[rows, columns], self.scales[rows], self.groups[columns])

    def plain(self) -> torch.Tensor:
        """The matrix, fp32 [n, k]."""
        out = torch.empty(self.shape)
        for first in range(0, len(out), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            scales = self.scales[rows] if self.by_row else self.scales[rows][:, self.groups]
            torch.mul(self.numbers[rows].float(), scales, out=out[rows])
        return out
