"""`LateAnswers`: what `LatePicks` copies to the host, and where in the rows' outputs it belongs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.backends.forward_rows import ForwardOutputs
from executor_service.backends.torch_backend.cuda.picking.late_plan import (
    LatePlan,
    alternatives_of,
    masked_outputs,
)
from executor_service.contract.plan import OutputMode, TokenScores

_NOTHING = np.zeros((2, 0, 1), np.int32)


class LateAnswers:
    """The copies of one plan's slices, in their order."""

    def __init__(self, rows: Sequence[ForwardRow], plan: LatePlan) -> None:
        self._rows, self._plan = rows, plan
        self.measures: list[torch.Tensor] = []  # each `Measures.packed` of a slice
        self.logits: list[torch.Tensor] = []  # fp32 [positions, vocabulary]

    def read(self, outputs: ForwardOutputs) -> None:
        """Add them to the step's outputs. Only when the copies are done."""
        plan = self._plan
        # Concatenated they are no views of page-locked memory.
        packed = np.concatenate([copy.numpy() for copy in self.measures] or [_NOTHING], axis=1)
        floats, ints = packed[0].view(np.float32), packed[1]
        logits = np.concatenate([copy.numpy() for copy in self.logits]) if self.logits else None
        end = 0
        for span in plan.spans:
            begin, end = end, end + span.positions
            output = outputs.others[span.row]
            if not output.finite:
                continue
            if begin in plan.copied:
                assert logits is not None
                output.logits = logits[begin - plan.copied.start : end - plan.copied.start]
            elif begin in plan.measured:
                row, in_prompt = self._rows[span.row], len(span.targets) > 0
                first = begin - plan.measured.start
                mine = slice(first, first + (span.positions if in_prompt else masked_outputs(row)))
                found = _measured(output, row, floats[mine], ints[mine], in_prompt=in_prompt)
                outputs.others[span.row] = found


def _measured(
    output: RowOutput,
    row: ForwardRow,
    floats: NDArray[np.float32],
    ints: NDArray[np.int32],
    *,
    in_prompt: bool,
) -> RowOutput:
    """The row's output with its measures, or those of its prompt's targets."""
    k = min(alternatives_of(row), ints.shape[1] - 1)
    ids, logprobs = ints[:, 1 : 1 + k], floats[:, 1 : 1 + k]
    if in_prompt:
        assert row.prompt is not None
        if not ints[:, 0].all():
            return RowOutput(finite=False)
        output.scores = TokenScores(row.prompt.first, floats[:, 0], ids, logprobs)
        return output
    if row.output is OutputMode.SAMPLE:
        output.logprobs = floats[:, 0]
    if k:
        output.top_ids, output.top_logprobs = ids, logprobs
    return output
