"""Rows by columns are the same rows as objects, and so are their outputs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.backends.forward_rows import ForwardOutputs, ForwardRows, RowColumns
from executor_service.cache.kv_cache import KvCache
from executor_service.cache.sequence import CachedSequence
from executor_service.contract.plan import (
    DRAWING,
    MIN_TEMPERATURE,
    OutputMode,
    Reason,
    Refusal,
    Sampling,
)
from executor_service.steps.decode_rows import DecodeRows

PAGE = 4


def decode_rows(lengths: Iterable[int], follows: Iterable[int]) -> DecodeRows:
    """Sequences of these KV lengths, whose pages are reserved for one more token."""
    pages, rows = KvCache(1000, PAGE), DecodeRows()
    for index, (length, former) in enumerate(zip(lengths, follows, strict=True)):
        ids = np.arange(length + 1, dtype=np.int32) + 10 * index
        table, _ = pages.open(bytes([index]), ids)
        pages.reserve(table, 0, length + 1)
        sequence = CachedSequence(
            table, ids, length=length, prompt_length=length, sampling=Sampling(seed=index), salt=b"",
            renewed_s=0.0,
        )  # fmt: skip
        rows.extend(index, [sequence], [length], [former])
    return rows


def chunk(start: int, count: int) -> ForwardRow:
    history = np.arange(start + count, dtype=np.int32)
    return ForwardRow(
        start, history[start:], history, start + count, np.arange(1, 20, dtype=np.int32), 0, OutputMode.NONE,
        Sampling(temperature=1.0),
    )  # fmt: skip


@pytest.mark.parametrize("others", [[], [chunk(3, 6)]])
def test_columns_are_those_of_the_same_rows_as_objects(others: list[ForwardRow]) -> None:
    decodes = decode_rows([3, 4, 9], [-1, -1, -1])
    rows = ForwardRows(others, decodes)
    mine, expected = rows.columns(PAGE), ForwardRows(list(rows)).columns(PAGE)
    for name in RowColumns._fields:
        column, same = getattr(mine, name), getattr(expected, name)
        if name == "tables":
            assert [table.tolist() for table in column] == [table.tolist() for table in same]
        else:
            assert list(column) == list(same), name


def test_a_row_that_follows_another_has_no_token_in_its_column() -> None:
    columns = ForwardRows([], decode_rows([5, 6], [1, -1])).columns(PAGE)
    assert columns.follows.tolist() == [1, -1]
    assert columns.tokens.tolist() == [0, 16]


def test_the_other_rows_are_found_without_an_object_for_any_that_decodes() -> None:
    class Columns(DecodeRows):
        __slots__ = ()

        def forward_rows(self) -> list[ForwardRow]:
            raise AssertionError("objects were made")

    decodes = Columns()
    decodes.indices.extend(range(3))
    other = chunk(0, 2)
    rows = ForwardRows([other], decodes)
    assert len(rows) == 4
    assert rows[3] is other
    assert rows.others == {3: other}


def test_outputs_by_columns_are_the_same_as_objects() -> None:
    refusal = Refusal(Reason.GRAMMAR, "nothing is allowed")
    one, two = RowOutput(np.array([7], np.int32)), RowOutput(np.array([9], np.int32))
    objects = [one, RowOutput(finite=False, refusal=refusal), two, last := RowOutput()]
    outputs = ForwardOutputs.of(objects, 3)
    assert (outputs.tokens, outputs.not_finite, outputs.others) == ([7, 0, 9], {1: refusal}, {3: last})
    assert repr(list(outputs)) == repr(objects)
    assert outputs[-1] is last


def test_a_decode_with_another_number_of_tokens_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="gave 2 tokens for 1 output position"):
        ForwardOutputs.of([RowOutput(np.array([1, 2], np.int32))], 1)


@pytest.mark.parametrize(("asked", "drawn"), [(0.0, 0.0), (1e-9, MIN_TEMPERATURE), (0.5, 0.5)])
def test_a_temperature_above_zero_is_raised_to_what_logits_can_be_divided_by(
    asked: float, drawn: float
) -> None:
    sampling = Sampling(temperature=asked, seed=(1 << 64) - 1, top_k=3)
    (numbers,) = np.frombuffer(sampling.drawing, DRAWING)
    assert numbers["temperature"] == np.float32(drawn)
    assert (numbers["seed"], numbers["top_k"]) == ((1 << 64) - 1, 3)
    assert sampling.temperature == asked
