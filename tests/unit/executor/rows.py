"""Drives a backend like an engine would, one sequence at a time, with page tables of the test's choice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from executor_service.backends.base import Backend, ForwardRow
from executor_service.contract.plan import OutputMode, Sampling

GREEDY = Sampling()


def make_row(
    tokens: Sequence[int],
    table: Sequence[int],
    *,
    start: int = 0,
    outputs: int = 1,
    output: OutputMode = OutputMode.FULL,
    sampling: Sampling = GREEDY,
    prompt_length: int | None = None,
    salt: bytes = b"",
    top_k: int = 0,
) -> ForwardRow:
    """A row that feeds tokens[start:] of a sequence whose pages are `table`."""
    history = np.array(tokens, dtype=np.int32)
    return ForwardRow(
        start=start,
        tokens=history[start:],
        history=history,
        prompt_length=len(history) if prompt_length is None else prompt_length,
        block_table=np.array(table, dtype=np.int32),
        outputs=outputs,
        output=output,
        sampling=sampling,
        top_k=top_k,
        salt=salt,
    )


def last_logits(backend: Backend, row: ForwardRow) -> np.ndarray:
    """The row's logits [outputs, V], computed alone."""
    (output,) = backend.forward([row])
    assert output.logits is not None
    return output.logits
