"""What a step computed, as its answer has it: arrays for all rows, details for special ones."""

from __future__ import annotations

import numpy as np
from paceline.executor.v1 import executor_pb2 as pb

from executor_service.contract.plan import (
    Reason,
    Refusal,
    RowResult,
    StepPlan,
    StepResult,
    TokenScores,
)
from executor_service.rpc.codec.results import encode_result
from tests.support.engine_steps import answered, planned


def test_results_are_parallel_arrays_and_only_special_rows_have_details() -> None:
    refusal = Refusal(Reason.PAGES, "no")
    rows = [
        RowResult(5, 0, [1, 2]),
        RowResult(refusal=refusal),
        RowResult(
            7,
            4,
            [3],
            np.array([-1.0], np.float32),
            np.array([[3, 4]], np.int32),
            np.array([[-1.0, -2.0]], np.float32),
            np.array([[0.5, 1.5]], np.float32),
        ),
    ]
    plan = StepPlan(step_id=9, rows=planned((refusal, refusal)), openings=(refusal,))
    message = pb.StepResult()
    encode_result(message, StepResult([], answered(rows), 3, 2, 10, 20), plan, 77)
    packed = message.rows
    assert (list(packed.kv_lengths), list(packed.token_counts), list(packed.tokens)) == (
        [5, 0, 7],
        [2, 0, 1],
        [1, 2, 3],
    )
    assert list(packed.cached_lengths) == [4]
    assert [(e.index, e.code, e.message) for e in packed.errors] == [(1, 8, "no")]
    (detail,) = packed.details
    assert (detail.row, detail.k, list(detail.top_ids), list(detail.logits.shape)) == (2, 2, [3, 4], [1, 2])
    assert np.frombuffer(detail.logits.data, "<f4").tolist() == [0.5, 1.5]
    assert (message.step_id, message.epoch, message.free_pages, message.queue_us) == (9, 77, 3, 10)


def test_scores_and_vectors_are_details() -> None:
    scores = TokenScores(
        4,
        np.array([-1.0, -2.0], np.float32),
        np.array([[3, 4, 5], [6, 7, 8]], np.int32),
        np.zeros((2, 3), np.float32),
    )
    rows = [RowResult(6, scores=scores), RowResult(6, hidden=np.array([0.5, 1.5], np.float32))]
    message = pb.StepResult()
    encode_result(
        message, StepResult([], answered(rows), 3, 2), StepPlan(openings=(Refusal(Reason.PAGES, ""),) * 2), 77
    )
    one, other = message.rows.details
    assert one.scores == pb.Scores(
        first=4, logprobs=[-1.0, -2.0], k=3, top_ids=[3, 4, 5, 6, 7, 8], top_logprobs=[0.0] * 6
    )
    assert not one.HasField("hidden")
    assert not other.HasField("scores")
    assert (list(other.hidden.shape), other.hidden.data) == ([2], np.array([0.5, 1.5], "<f4").tobytes())
