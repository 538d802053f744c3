"""`resolve` finds on the device what the host would derive if it knew where the step before ends."""

from __future__ import annotations

import numpy as np
import torch

from executor_service.backends.base import ForwardRow
from executor_service.backends.forward_rows import ForwardRows, RowColumns
from executor_service.backends.torch_backend.cuda.layout.host_step import HostStep
from executor_service.backends.torch_backend.cuda.layout.resolve import Resolved, TokenPages, resolve
from executor_service.backends.torch_backend.cuda.layout.row_ends import RowEnds, accept_launch
from executor_service.backends.torch_backend.cuda.layout.rows import Tiling
from executor_service.backends.torch_backend.cuda.layout.step_buffer import (
    StepBuffer,
    StepShape,
    numbers_of,
)
from executor_service.backends.torch_backend.ops.row_tensors import lay_out
from executor_service.contract import noise
from executor_service.contract.plan import OutputMode, Sampling

CPU = torch.device("cpu")
PAGE = 16
TILING = Tiling.of(2, torch.float32)
SIZES = [(30, 1), (500, 5), (40, 20), (0, 40), (511, 2), (15, 3), (2050, 30)]
"""Cached and fed tokens of rows, some of whose pieces of keys end near."""


def row_of(start: int, count: int, first_page: int, *, follows: int = -1, slack: int = 0) -> ForwardRow:
    tokens = np.arange(100 + start, 100 + start + count, dtype=np.int32)
    table = np.arange(first_page, first_page + -(-(start + count) // PAGE), dtype=np.int32)
    history = np.concatenate([np.zeros(start, np.int32), tokens])
    sampling = Sampling(seed=(1 << 63) + 12345 * first_page)
    return ForwardRow(
        start, tokens, history, 1, table, min(count, 4), OutputMode.SAMPLE, sampling, follows=follows,
        slack=slack,
    )  # fmt: skip


def items_of(step: StepBuffer) -> list[list[list[int]]]:
    return [
        work.items[: int(work.bounds[-1])].tolist()
        for rows in step.attention.values()
        for work in (rows.short, rows.long)
    ]


def buffered(rows: list[ForwardRow], padding: int = 0) -> StepBuffer:
    host = HostStep(ForwardRows(rows), PAGE, TILING)
    shape = host.shape
    if padding:
        sizes = {name: getattr(shape, name) + padding for name in StepShape._fields[:-1]}
        shape = shape._replace(**sizes)
    buffer = np.full(numbers_of(shape), -7, np.int32)
    host.write(shape, buffer)
    return StepBuffer(torch.from_numpy(buffer), shape, TILING)


def found(step: StepBuffer, ends: RowEnds, history: TokenPages) -> Resolved:
    return resolve(step.rows, step.attention.values(), ends, history)


def test_rows_that_follow_are_what_they_are_where_the_step_before_ends() -> None:
    """All but the first, each after another number of rejected drafts; padded, whose tokens go to page 0."""
    late = [0, 3, 0, 0, 2, 15, 7]
    ends = RowEnds.of(64, CPU)
    actual, assumed = [], []
    for i, ((start, count), by) in enumerate(zip(SIZES, late, strict=True)):
        page = 1 + 200 * i
        follows = 3 * i if i in (1, 4, 5, 6) else -1
        actual.append(row_of(start, count, page))
        ahead = row_of(start + by, count, page, follows=follows, slack=20)
        ahead.tokens = actual[-1].tokens.copy()
        if follows >= 0:
            ends.tokens[follows], ends.lengths[follows] = int(ahead.tokens[0]), start
            ahead.tokens[0] = -1
        assumed.append(ahead)
    history, expected = TokenPages(2000, PAGE, CPU), lay_out(RowColumns.of(actual, PAGE), PAGE)
    step = buffered(assumed, padding=9)
    resolved = found(step, ends, history)
    count, outputs = len(expected.tokens), len(expected.outputs)
    for ours, theirs in (
        (resolved.tokens, expected.tokens),
        (resolved.positions, expected.positions),
        (resolved.pages, expected.pages),
        (resolved.slots, expected.slots),
    ):
        assert ours[:count].tolist() == theirs.tolist()
        assert ours[count:].tolist() == [0] * 9
    seeds = np.repeat(np.array([row.sampling.seed for row in actual], np.uint64), expected.output_counts)
    keys = noise.keys(seeds, expected.positions[expected.outputs] + 1).view(np.int32).reshape(-1, 2)
    assert resolved.key_lows[:outputs].tolist() == keys[:, 0].tolist()
    assert resolved.key_highs[:outputs].tolist() == keys[:, 1].tolist()
    stored = history.ids[expected.pages, expected.slots]
    assert stored.tolist() == expected.tokens.tolist()
    assert int((history.ids[1:] != 0).sum()) == count
    # Items of keys that a row does not reach have no tokens.
    for items, needed in zip(items_of(step), items_of(buffered(actual)), strict=True):
        have = [item[:3] + item[4:] for item in items]  # without the starts of block tables
        assert [item for item in have if item[1]] == [item[:3] + item[4:] for item in needed]
        assert all(item[1:3] == [0, 1] for item in have if not item[1])


def test_a_row_ends_behind_the_drafts_that_were_picked_in_their_places() -> None:
    """Up to the first that was not; of one without outputs nothing is asked."""
    rows = [row_of(30, 1, 1), row_of(10, 40, 9), row_of(7, 40, 20), row_of(3, 5, 30), row_of(5, 2, 40)]
    for row, outputs in zip(rows, (1, 40, 34, 0, 2), strict=True):
        row.outputs = outputs
    layout = lay_out(RowColumns.of(rows, PAGE), PAGE)
    step = buffered(rows)
    picks = torch.from_numpy(layout.tokens[np.minimum(layout.outputs + 1, len(layout.tokens) - 1)].copy())
    wrong = 1 + 40 + 20  # of the third row, the 21st pick
    picks[wrong] = 7
    picks[1 + 39] = 8  # after all drafts of the second
    picks[1 + 40 + 34] = 9  # after no draft of the last
    ends = RowEnds.of(64, CPU)
    targets = torch.tensor([5, 6, 7, 8, 9], dtype=torch.int32)
    history = TokenPages(100, PAGE, CPU)
    resolved = found(step, RowEnds.of(64, CPU), history)
    accept_launch(
        ends, picks, resolved.tokens, resolved.positions, step.outputs, step.first_outputs,
        step.last_outputs, targets,
    ).run()  # fmt: skip
    expected = {5: (int(picks[0]), 31), 6: (8, 50), 7: (7, 7 + 40 - 33 + 20), 9: (9, 6)}
    for place, (token, length) in expected.items():
        assert (int(ends.tokens[place]), int(ends.lengths[place])) == (token, length)
