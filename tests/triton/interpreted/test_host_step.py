"""A step that most rows only decode in is the same step, whether these are columns or objects."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor_service.backends.base import ForwardRow
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.cuda.layout.host_step import HostStep
from executor_service.backends.torch_backend.cuda.layout.rows import Tiling
from executor_service.backends.torch_backend.cuda.layout.step_buffer import StepShape, numbers_of, places_of
from executor_service.contract.plan import OutputMode, Sampling
from tests.unit.executor.test_forward_rows import PAGE, chunk, decode_rows

TILING = Tiling.of(4, torch.bfloat16, windows=(0, 20))
_FREE = -7  # what the buffer held before


def verification(start: int, drafts: int) -> ForwardRow:
    history = np.arange(start + 1 + drafts, dtype=np.int32)
    table = np.arange(40, 40 + -(-len(history) // PAGE), dtype=np.int32)
    sampling = Sampling(temperature=0.5, top_k=7, seed=1 << 40)
    return ForwardRow(
        start, history[start:], history, 1, table, 1 + drafts, OutputMode.SAMPLE, sampling, follows=2, slack=3
    )


def padded(shape: StepShape) -> StepShape:
    return shape._replace(**{name: getattr(shape, name) + 5 for name in StepShape._fields[:-1]})


def parts_of(step: HostStep, shape: StepShape) -> dict[str, list[int]]:
    buffer = np.full(numbers_of(shape), _FREE, np.int32)
    step.write(shape, buffer)
    return {name: buffer[part].tolist() for place in places_of(shape) for name, part in place.parts()}


@pytest.mark.parametrize("others", [[], [verification(9, 4), chunk(3, 30)]])
def test_rows_by_columns_make_the_buffer_of_the_same_rows_as_objects(others: list[ForwardRow]) -> None:
    rows = ForwardRows(others, decode_rows([3, 600, 9, 1100], [-1, -1, -1, -1]))
    mine, expected = HostStep(rows, PAGE, TILING), HostStep(ForwardRows(rows), PAGE, TILING)
    assert mine.shape == expected.shape
    for shape in (mine.shape, padded(mine.shape)):
        assert parts_of(mine, shape) == parts_of(expected, shape)


def test_what_a_step_does_not_fill_is_padding() -> None:
    """Of no row, and without work; what is read by a number of its own stays as it was."""
    step = HostStep(ForwardRows([], decode_rows([3, 9], [1, 0])), PAGE, TILING)
    parts = parts_of(step, padded(step.shape))
    assert parts["owners"] == [1, 2, 0, 0, 0, 0, 0]
    assert parts["follows"] == [2, 1, 0, 0, 0, 0, 0]
    assert parts["first_outputs"][:2] == parts["last_outputs"][:2] == [0, 1]
    assert parts["short_bounds"] == [0, 2, 2, 2, 2, 2, 2]
    assert parts["short_items"][14:] == [_FREE] * 35
    assert parts["tables"][4:] == [_FREE] * 5
