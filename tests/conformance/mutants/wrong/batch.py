"""Rows beside a refused row: caught by test_batch.py."""

from __future__ import annotations

from typing import Any

from executor_service.contract.plan import Reason, Refusal, RowResult
from executor_service.steps.reservation import RowReservation
from executor_service.steps.step_rows import StepRows
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def neighbours_poisoned() -> None:
    """a refused row takes the rows after it along"""

    def reserve(original: Any, self: RowReservation) -> StepRows:
        rows: StepRows = original(self)
        bad = [i for i, result in enumerate(rows.results) if result.refusal is not None]
        for row in [row for row in rows.accepted if bad and row.index > bad[0]]:
            rows.accepted.remove(row)
            refusal = Refusal(Reason.INVALID, "another row was wrong")
            rows.results[row.index] = RowResult(refusal=refusal)
        return rows

    wrap(RowReservation, "reserve", reserve)
