"""`RowResults`: the results of a step's rows, most of them by columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from executor_service.contract.plan import RowResult


class RowResults(Sequence[RowResult]):
    """One result for each row of a step. Those of rows that only decode have no objects of their own."""

    __slots__ = ("kv_lengths", "others", "tokens")

    def __init__(self, rows: int) -> None:
        """All results are empty."""
        self.kv_lengths = [0] * rows
        self.tokens: list[Sequence[int]] = [()] * rows
        self.others: dict[int, RowResult] = {}  # by index; their lengths and tokens are in the columns too

    @classmethod
    def of(cls, results: Sequence[RowResult]) -> RowResults:
        """The same results by columns."""
        if isinstance(results, RowResults):
            return results
        columns = cls(len(results))
        for index, result in enumerate(results):
            columns[index] = result
        return columns

    def __len__(self) -> int:
        return len(self.kv_lengths)

    @overload
    def __getitem__(self, index: int) -> RowResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[RowResult]: ...
    def __getitem__(self, index: int | slice) -> RowResult | list[RowResult]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]  # not negative
        other = self.others.get(index)
        if other is not None:
            return other
        return RowResult(self.kv_lengths[index], 0, list(self.tokens[index]))

    def __setitem__(self, index: int, result: RowResult) -> None:
        """Set a result that has more than a length and tokens."""
        self.kv_lengths[index], self.tokens[index] = result.kv_length, result.tokens
        self.others[index] = result
