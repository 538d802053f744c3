"""`RowEnds`: where each row of a step ends on the device, in one Triton kernel after its picks.

A row that verifies drafts has an output after its pending tokens and after each draft. Accepted are the
drafts up to the first that is not the token picked in its place. What is picked after them is the row's last
token, and the tokens up to there are the sequence's: that is all that a row of the next step has to know.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel
from executor_service.backends.torch_backend.cuda.launch.launch import Launch

_TILE = 16  # drafts that are compared at once


@dataclass(frozen=True, slots=True)
class RowEnds:
    """By the row's index in its step, int32 on the device."""

    tokens: torch.Tensor  # the last token that it emitted
    lengths: torch.Tensor  # the KV length of its sequence

    @classmethod
    def of(cls, rows: int, device: torch.device) -> RowEnds:
        """For steps of up to `rows` rows."""
        return cls(*torch.zeros(2, rows, dtype=torch.int32, device=device).unbind())


_VIEWS = ("picks", "tokens", "positions", "outputs", "firsts", "lasts", "targets")


@triton.jit(do_not_specialize=_VIEWS)
def _accept_kernel(
    end_tokens, end_lengths, picks, tokens, positions, outputs, firsts, lasts, targets, tile: tl.constexpr
):
    """Program (row): compare its drafts with what was picked, and store where it ends."""
    begin_kernel()
    row, lane = tl.program_id(0), tl.arange(0, tile)
    last = tl.load(lasts + row)
    begin = tl.minimum(tl.load(firsts + row), last)  # a row without outputs has no end: anything is stored
    end = last
    while begin < end:
        output = begin + lane
        live = output < end
        draft = tl.load(tokens + tl.load(outputs + output, mask=live, other=0) + 1, mask=live, other=0)
        wrong = live & (draft != tl.load(picks + output, mask=live, other=0))
        end = tl.minimum(end, tl.min(tl.where(wrong, output, end), 0))
        begin += tile
    target = tl.load(targets + row)
    tl.store(end_tokens + target, tl.load(picks + end))
    tl.store(end_lengths + target, tl.load(positions + tl.load(outputs + end)) + 1)


def accept_launch(
    ends: RowEnds,
    picks: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    outputs: torch.Tensor,
    firsts: torch.Tensor,
    lasts: torch.Tensor,
    targets: torch.Tensor,
) -> Launch:
    """Store in `ends` where rows end: row i, whose outputs are firsts[i] .. lasts[i], at targets[i].

    picks [outputs]: the tokens picked; tokens, positions: of the step; outputs: indices of its tokens. There
    is at least one output. All int32.
    """
    return Launch(
        _accept_kernel,
        (len(firsts), 1, 1),
        {
            "end_tokens": ends.tokens, "end_lengths": ends.lengths, "picks": picks, "tokens": tokens,
            "positions": positions, "outputs": outputs, "firsts": firsts, "lasts": lasts, "targets": targets,
        },
        {"tile": _TILE},
        warps=1,
        stages=1,
    )  # fmt: skip
