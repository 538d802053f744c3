"""Changes of the logits of listed tokens, in three Triton kernels: biases, and the mask of stop ids.

A mask of stop ids that leaves no token gives way: the logits are then as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel
from executor_service.backends.torch_backend.cuda.launch.launch import Arguments, Launch

_LIST_TILE, _TILE = 128, 4096  # listed tokens, and tokens of the vocabulary, read at once
_VIEWS = (
    "bias_ids", "biases", "bias_begins", "bias_ends", "stop_ids", "stop_begins", "stop_ends", "kept", "width",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Biases:
    """Biases of some outputs: device tensors. No list has a token twice."""

    bias_ids: torch.Tensor  # int32: all lists, concatenated
    biases: torch.Tensor  # fp32: the same
    bias_begins: torch.Tensor  # int32 [outputs]: where each output's list is
    bias_ends: torch.Tensor  # int32 [outputs]


@dataclass(frozen=True, slots=True)
class Stops:
    """Stop ids that some outputs may not be: device tensors, int32. No list has a token twice."""

    stop_ids: torch.Tensor  # all lists, concatenated
    stop_begins: torch.Tensor  # [outputs]: where each output's list is
    stop_ends: torch.Tensor  # [outputs]


@triton.jit(do_not_specialize=_VIEWS)
def _bias_kernel(logits, bias_ids, biases, bias_begins, bias_ends, stride, tile: tl.constexpr):
    """Program (output): add the biases."""
    begin_kernel()
    output, lane = tl.program_id(0), tl.arange(0, tile)
    source, end = logits + output.to(tl.int64) * stride, tl.load(bias_ends + output)
    for first in range(tl.load(bias_begins + output), end, tile):
        live = first + lane < end
        token = tl.load(bias_ids + first + lane, mask=live, other=0)
        value = tl.load(source + token, mask=live, other=0.0)
        tl.store(source + token, value + tl.load(biases + first + lane, mask=live, other=0.0), mask=live)


@triton.jit(do_not_specialize=_VIEWS)
def _mask_kernel(logits, kept, stop_ids, stop_begins, stop_ends, stride, width, tile: tl.constexpr):
    """Program (output): keep the logits of the stop ids elsewhere, and exclude these ids."""
    begin_kernel()
    output, lane = tl.program_id(0), tl.arange(0, tile)
    source, begin = logits + output.to(tl.int64) * stride, tl.load(stop_begins + output)
    count = tl.load(stop_ends + output) - begin
    for first in range(0, count, tile):
        live = first + lane < count
        token = tl.load(stop_ids + begin + first + lane, mask=live, other=0)
        value = tl.load(source + token, mask=live, other=0.0)
        tl.store(kept + output * width + first + lane, value, mask=live)
        tl.store(source + token, tl.full([tile], float("-inf"), tl.float32), mask=live)


@triton.jit(do_not_specialize=_VIEWS)
def _unmask_kernel(
    logits, kept, stop_ids, stop_begins, stop_ends, vocabulary, stride, width,
    list_tile: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Program (output): bring the kept logits back where no token is left."""
    begin_kernel()
    output, lane = tl.program_id(0), tl.arange(0, tile)
    source, begin = logits + output.to(tl.int64) * stride, tl.load(stop_begins + output)
    count = tl.load(stop_ends + output) - begin
    if count > 0:
        first, left = 0, 0
        while (first < vocabulary) & (left == 0):
            token = first + lane
            logit = tl.load(source + token, mask=token < vocabulary, other=float("-inf"))
            left = tl.max((logit > float("-inf")).to(tl.int32), 0)
            first += tile
        if left == 0:
            item = tl.arange(0, list_tile)
            for start in range(0, count, list_tile):
                live = start + item < count
                token = tl.load(stop_ids + begin + start + item, mask=live, other=0)
                value = tl.load(kept + output * width + start + item, mask=live, other=0.0)
                tl.store(source + token, value, mask=live)


def bias_launch(logits: torch.Tensor, lists: Biases) -> Launch:
    """Add the biases to logits, fp32 [outputs, vocabulary] with contiguous tokens, in place."""
    return Launch(
        _bias_kernel,
        (len(logits), 1, 1),
        {
            "logits": logits, "bias_ids": lists.bias_ids, "biases": lists.biases,
            "bias_begins": lists.bias_begins, "bias_ends": lists.bias_ends, "stride": logits.stride(0),
        },
        {"tile": _LIST_TILE},
        warps=4,
        stages=1,
    )  # fmt: skip


def stop_launches(logits: torch.Tensor, lists: Stops, kept: torch.Tensor) -> Iterator[Launch]:
    """The launches that exclude stop ids, in place; kept is scratch, fp32 [outputs, longest list]."""
    lists_of: Arguments = {
        "logits": logits, "kept": kept, "stop_ids": lists.stop_ids, "stop_begins": lists.stop_begins,
        "stop_ends": lists.stop_ends, "stride": logits.stride(0), "width": kept.shape[1],
    }  # fmt: skip
    grid = (len(logits), 1, 1)
    yield Launch(_mask_kernel, grid, lists_of, {"tile": _LIST_TILE}, warps=4, stages=1)
    yield Launch(
        _unmask_kernel,
        grid,
        lists_of | {"vocabulary": logits.shape[1]},
        {"list_tile": _LIST_TILE, "tile": _TILE},
        warps=8,
        stages=1,
    )
