"""Vectors of prompts: caught by test_hidden.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from executor_service.contract.plan import Opening
from executor_service.steps import commit
from executor_service.steps.accepted_row import AcceptedRow
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def mean_without_a_chunk() -> None:
    """the tokens of the opening's own row are missing in the mean of a prompt in chunks"""

    def forgetful(original: Any, row: AcceptedRow, output: Any, result: Any) -> None:
        if row.opened and row.hidden_sum is not None and not row.outputs:
            row.hidden_sum = np.zeros_like(row.hidden_sum)
        original(row, output, result)

    wrap(commit, "_add_prompt_outputs", forgetful)


@mutant()
def mean_behind_a_prefix_hit() -> None:
    """cached tokens are missing in the mean"""
    Opening.max_hit = property(  # type: ignore[assignment,method-assign]
        lambda self: (self.scored_from or len(self.tokens)) - 1
    )


@mutant()
def vector_of_another_row() -> None:
    """a row gets the vector of the row before it"""
    vectors: list[Any] = []

    def exchanged(original: Any, row: AcceptedRow, output: Any, result: Any) -> None:
        original(row, output, result)
        if result.hidden is not None:
            vectors.append(result.hidden)
            result.hidden = vectors[-2:][0]

    wrap(commit, "_add_prompt_outputs", exchanged)


@mutant()
def mean_is_divided_by_the_row() -> None:
    """the sum over all chunks is divided by the tokens of the last one"""

    def divided(original: Any, row: AcceptedRow, output: Any, result: Any) -> None:
        original(row, output, result)
        if row.hidden_sum is not None and result.hidden is not None:
            result.hidden = result.hidden * np.float32(row.sequence.length / row.fed)

    wrap(commit, "_add_prompt_outputs", divided)
