"""Rows of several steps: caught by test_steps.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_service.steps.reservation import RowReservation
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def steps_off_by_one() -> None:
    """a row of several steps ends one early"""

    def proceed(original: Any, self: RowReservation, index: int, row: Any) -> Any:
        return original(self, index, replace(row, steps=max(row.steps - 1, 1)))

    wrap(RowReservation, "_continue", proceed)
