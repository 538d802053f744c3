"""`StepTable`: the rows of a step at one stage, from the request to the answer.

    requested  `PlannedRows` (`contract/plan.py`)
    computed   `ForwardRows`, `ForwardOutputs` (`backends/forward_rows.py`)
    answered   `RowResults` (`contract/plan.py`)

In most steps most rows only decode: each feeds one token, draws the next, and wants nothing else. Such a row
has an entry in each column of a table, and no object of its own, which would cost more than all else that is
done for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar, overload

T = TypeVar("T")


class StepTable(Sequence[T], ABC):
    """Rows by columns, and by index the objects of those that columns do not describe."""

    __slots__ = ("others",)

    def __init__(self, others: dict[int, T]) -> None:
        self.others = others

    @abstractmethod
    def _row_of_columns(self, index: int) -> T:
        """The row at an index that is not in `others`, as an object."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]  # not negative
        other = self.others.get(index)
        return self._row_of_columns(index) if other is None else other
