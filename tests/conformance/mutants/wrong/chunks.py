"""Prompts in chunks: caught by test_chunks.py."""

from __future__ import annotations

from typing import Any

from executor_service.contract.plan import OutputMode, Refusal
from executor_service.steps.reservation import RowReservation
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def chunk_samples_too_early() -> None:
    """a chunk samples although the prompt goes on"""

    def always_sample(original: Any, self: RowReservation, *args: Any) -> Any:
        row = original(self, *args)
        if not isinstance(row, Refusal) and row.output is not OutputMode.NONE and not row.outputs:
            row.outputs = 1
        return row

    wrap(RowReservation, "_open", always_sample)
    wrap(RowReservation, "_continue", always_sample)
