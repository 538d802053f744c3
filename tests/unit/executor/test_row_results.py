"""Results by columns are the results of the rows, and are answered as such."""

from __future__ import annotations

import numpy as np
from paceline.executor.v1 import executor_pb2 as pb

from executor_service.contract.plan import Reason, Refusal, RowResult, RowResults, StepPlan, StepResult
from executor_service.rpc.codec.results import encode_result
from tests.support.engine_steps import answered, planned

REFUSED = Refusal(Reason.PAGES, "no")
OBJECTS = [
    RowResult(5, 0, [1]),
    RowResult(refusal=REFUSED),
    RowResult(6, 0, [9]),
    RowResult(8, 0, [2, 3], np.array([-1.0, -2.0], np.float32)),
    RowResult(7, 4, [], np.array([-3.0], np.float32)),
]


def columns() -> RowResults:
    """Those of OBJECTS; as in a commit, the other rows are set in an order of their own."""
    made = RowResults(len(OBJECTS))
    for index in (4, 3, 1):
        made[index] = OBJECTS[index]
    for index in (0, 2):
        made.kv_lengths[index], made.tokens[index] = OBJECTS[index].kv_length, tuple(OBJECTS[index].tokens)
    return made


def encoded(results: RowResults) -> pb.StepResult:
    message = pb.StepResult()
    encode_result(
        message, StepResult([], results, 3, 2), StepPlan(rows=planned([REFUSED] * 4), openings=(REFUSED,)), 1
    )
    return message


def test_columns_hold_the_same_results_in_the_same_order() -> None:
    assert repr(list(columns())) == repr(OBJECTS)
    assert columns()[1] is OBJECTS[1]
    assert repr(columns()[1:3]) == repr(OBJECTS[1:3])
    assert columns()[-2] is OBJECTS[-2]
    assert repr(columns()[-3]) == repr(OBJECTS[-3])


def test_answers_do_not_depend_on_the_form_of_the_results() -> None:
    answer = encoded(columns())
    assert answer == encoded(answered(OBJECTS))
    assert list(answer.rows.kv_lengths) == [5, 0, 6, 8, 7]
    assert list(answer.rows.tokens) == [1, 9, 2, 3]
    assert [error.index for error in answer.rows.errors] == [1]
    assert [detail.row for detail in answer.rows.details] == [3, 4]
    assert list(answer.rows.cached_lengths) == [4]


def test_a_result_that_is_not_set_is_empty() -> None:
    assert repr(RowResults(1)[0]) == repr(RowResult())
