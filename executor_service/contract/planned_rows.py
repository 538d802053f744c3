"""`PlannedRows`: the rows of a step that continue sequences, most of them by columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import overload

from executor_service.contract.plan import NO_TOKENS, Refusal, Row

_NOTHING: Mapping[int, Row | Refusal] = MappingProxyType({})


class PlannedRows(Sequence[Row | Refusal]):
    """Rows in the order of the step. Those that only decode, which most are, have no objects of their own."""

    __slots__ = ("cache_ids", "kv_lengths", "others")

    def __init__(
        self, cache_ids: list[int], kv_lengths: list[int], others: Mapping[int, Row | Refusal] = _NOTHING
    ) -> None:
        """`others`: by index, the rows that do not only decode; a refusal has zeros in the columns."""
        self.cache_ids, self.kv_lengths, self.others = cache_ids, kv_lengths, others

    @classmethod
    def of(cls, rows: Sequence[Row | Refusal]) -> PlannedRows:
        """The same rows by columns."""
        if isinstance(rows, PlannedRows):
            return rows
        return cls(
            [0 if isinstance(row, Refusal) else row.cache_id for row in rows],
            [0 if isinstance(row, Refusal) else row.kv_length for row in rows],
            {i: row for i, row in enumerate(rows) if isinstance(row, Refusal) or not row.only_decodes},
        )

    def __len__(self) -> int:
        return len(self.cache_ids)

    @overload
    def __getitem__(self, index: int) -> Row | Refusal: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row | Refusal]: ...
    def __getitem__(self, index: int | slice) -> Row | Refusal | list[Row | Refusal]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]  # not negative
        other = self.others.get(index)
        if other is not None:
            return other
        return Row(self.cache_ids[index], self.kv_lengths[index], NO_TOKENS, NO_TOKENS)
