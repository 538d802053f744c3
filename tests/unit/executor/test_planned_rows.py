"""Rows by columns are the rows that were planned, and are reserved in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from executor_service.contract.plan import NO_TOKENS, Reason, Refusal, Row, StepPlan
from tests.support.engine_steps import execute, planned
from tests.unit.executor.fakes import limits
from tests.unit.executor.harness import Harness, opening

Planner = Callable[[int, int], Row]

REFUSED = Refusal(Reason.INVALID, "no")


def decode(cache_id: int, kv_length: int) -> Row:
    return Row(cache_id, kv_length, NO_TOKENS, NO_TOKENS)


def verify(cache_id: int, kv_length: int) -> Row:
    return Row(cache_id, kv_length, NO_TOKENS, np.array([1], np.int32))


def test_columns_hold_the_same_rows_in_the_same_order() -> None:
    rows: list[Row | Refusal] = [decode(3, 7), REFUSED, verify(4, 9), decode(5, 1)]
    columns = planned(rows)
    assert [repr(row) for row in columns] == [repr(row) for row in rows]
    assert columns[2] is rows[2]
    assert columns[1:3] == rows[1:3]
    assert columns[-2] is rows[-2]
    assert repr(columns[-1]) == repr(rows[-1])
    assert list(columns.others) == [1, 2]
    assert (columns.cache_ids, columns.kv_lengths) == ([3, 0, 4, 5], [7, 0, 9, 1])


@pytest.mark.parametrize("first", [decode, verify])
@pytest.mark.parametrize("second", [decode, verify])
def test_the_last_page_goes_to_the_first_row_that_needs_one(first: Planner, second: Planner) -> None:
    h = Harness(limits(total_pages=5))
    for cache_id in (1, 2):  # two full pages each
        h.row(opening(cache_id, [cache_id] * 8))
    result = h.step(first(2, 8), second(1, 8))
    assert [row.kv_length > 8 for row in result.rows] == [True, False]
    assert result.rows[1].refusal is not None
    assert result.rows[1].refusal.reason is Reason.PAGES


def refused(rows: Sequence[Row | Refusal]) -> list[Refusal | None]:
    h = Harness()
    for cache_id in (1, 2, 3):
        h.row(opening(cache_id, [cache_id] * 6))
    results = execute(h.engine, StepPlan(rows=planned(rows))).rows
    h.engine.store.check()
    assert [row.kv_length for row in results] == [0 if row.refusal else 7 for row in results]
    return [row.refusal for row in results]


def test_what_is_wrong_with_a_row_harms_no_row_that_only_decodes() -> None:
    expected = [
        REFUSED,
        None,
        Refusal(Reason.INVALID, "rows.cache_ids[2]: cache 2 has more than one row in the step"),
        Refusal(Reason.KV_LENGTH, "rows.kv_lengths[3]: expected 5, is 6", 6),
        Refusal(Reason.INVALID, "rows.cache_ids[4]: cache 2 has more than one row in the step"),
        REFUSED,
        Refusal(Reason.CACHE, "rows.cache_ids[6]: unknown or released cache 9"),
    ]
    wrong: list[Row | Refusal] = [decode(3, 5), decode(2, 6), REFUSED, decode(9, 6)]
    rows = [REFUSED, decode(1, 6), decode(2, 6), *wrong]
    assert refused(rows) == expected


@pytest.mark.parametrize("last", [decode, verify])
def test_rows_that_only_decode_count_among_the_steps_tokens(last: Planner) -> None:
    h = Harness(limits(max_step_tokens=2))
    for cache_id in (1, 2, 3):
        h.row(opening(cache_id, [cache_id]))
    refusals = [row.refusal for row in h.step(decode(1, 1), decode(2, 1), last(3, 1)).rows]
    assert refusals[:2] == [None, None]
    assert refusals[2] is not None
    assert refusals[2].reason is Reason.TOO_LARGE
