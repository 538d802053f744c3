"""The experts of up to MAX_ROWS tokens in Triton: each pair of token and expert has a product of its own.

Such a step takes as long as the experts' weights take to load, which `skinny_gemm` says more about. Nothing
is sorted: programs find their expert's weights themselves. Pairs of one expert that compute the same outputs
run at the same time, so that the second one finds the weights in the cache.

**A row's result depends neither on the other rows nor on their number**, up to MAX_ROWS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel, let_next_start
from executor_service.backends.torch_backend.cuda.launch.launch import Launch
from executor_service.backends.torch_backend.cuda.linear.pointwise import joined
from executor_service.backends.torch_backend.cuda.linear.skinny_gemm import FEW, sums_of_rows, tiles
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.ops.stacked_experts import StackedExperts


@triton.jit
def _one_row(
    x, weight, column, there, k, outputs: tl.constexpr, inputs: tl.constexpr, lines: tl.constexpr,
    factor: tl.constexpr,
):  # fmt: skip
    """Rows `column` of weight [n, k] times x [k]: fp32 [outputs]."""
    line = tl.arange(0, lines)
    sums = tl.zeros([outputs, lines], tl.float32)
    sums = sums_of_rows(
        sums, x, weight, column, there, line, line < 1, 0, k, k, 0, inputs=inputs, factor=factor
    )
    return tl.sum(tl.where(line[None, :] < 1, sums, 0.0), 1)


@triton.jit
def _few_gated_kernel(
    out, x, chosen, weight, inner, k, x_stride,
    count: tl.constexpr, activation: tl.constexpr,
    outputs: tl.constexpr, inputs: tl.constexpr, lines: tl.constexpr, factor: tl.constexpr,
):  # fmt: skip
    """Program (pair, block): a few outputs of activation(gate x) * up x. A tile has their gates, then ups."""
    begin_kernel(late=1)
    half: tl.constexpr = outputs // 2
    pair = tl.program_id(0).to(tl.int64)
    first, output = tl.program_id(1) * half, tl.arange(0, outputs)
    mine = first + output % half
    expert = tl.load(chosen + pair)
    sums = _one_row(
        x + pair // count * x_stride, weight + expert * (2 * inner) * k, mine + output // half * inner,
        mine < inner, k, outputs, inputs, lines, factor,
    )  # fmt: skip
    let_next_start()
    both = sums.to(out.dtype.element_ty).to(tl.float32)  # rounded, as a product's results are
    gate, up = tl.split(tl.permute(tl.reshape(both, [2, half]), (1, 0)))
    column = first + tl.arange(0, half)
    result = joined(gate, up, activation, out.dtype.element_ty)
    tl.store(out + pair * inner + column, result, mask=column < inner)


@triton.jit
def _few_down_kernel(
    out, x, chosen, weight, n, k,
    outputs: tl.constexpr, inputs: tl.constexpr, lines: tl.constexpr, factor: tl.constexpr,
):  # fmt: skip
    """Program (pair, block): a few outputs of down x."""
    begin_kernel()
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * outputs + tl.arange(0, outputs)
    expert = tl.load(chosen + pair)
    sums = _one_row(
        x + pair * k, weight + expert * n * k, column, column < n, k, outputs, inputs, lines, factor
    )
    tl.store(out + pair * n + column, sums.to(out.dtype.element_ty), mask=column < n)


def few_experts(x: torch.Tensor, chosen: torch.Tensor, experts: StackedExperts) -> torch.Tensor:
    """The result of each token's experts, [pairs, hidden], for up to MAX_ROWS tokens.

    x [tokens, hidden] bf16 or fp16 with contiguous columns; chosen int64 [tokens, experts of a token],
    contiguous.
    """
    pairs = chosen.numel()
    inner = x.new_empty(pairs, experts.down.shape[2])
    few_gated_launch(x, chosen, experts.gate_up, inner, experts.activation).run()
    out = x.new_empty(pairs, x.shape[1])
    few_down_launch(inner, chosen, experts.down, out).run()
    return out


def few_gated_launch(
    x: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, activation: Activation
) -> Launch:
    """The launch of the gated half: weight [experts, 2 inner, hidden], out [pairs, inner], contiguous."""
    constants = tiles(weight, x.dtype)
    pairs, inner = out.shape
    return Launch(
        _few_gated_kernel,
        (pairs, -(-2 * inner // constants["outputs"]), 1),
        {
            "out": out, "x": x, "chosen": chosen, "weight": weight,
            "inner": inner, "k": x.shape[1], "x_stride": x.stride(0),
        },
        {"count": chosen.shape[1], "activation": int(activation), **constants},
        **FEW.options,
    )  # fmt: skip


def few_down_launch(x: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Launch:
    """The launch of the other half: x [pairs, inner], weight [experts, hidden, inner], contiguous."""
    constants = tiles(weight, x.dtype)
    pairs, n = out.shape
    return Launch(
        _few_down_kernel,
        (pairs, -(-n // constants["outputs"]), 1),
        {"out": out, "x": x, "chosen": chosen, "weight": weight, "n": n, "k": x.shape[1]},
        constants,
        **FEW.options,
    )
