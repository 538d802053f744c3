"""Matrix products of few rows in Triton, which read each weight once.

Such a product takes as long as its weights take to load. A program computes a few outputs of all rows. It
goes over their weights in tiles, some of which are loaded ahead of use: memory is busy while as many bytes
are on their way as it delivers in the time of one load (Little's law). Tests compile the kernels and count
them. Matrix instructions multiply the tiles. Rows are columns of theirs: eight, or more for more rows.
In dependent launches a program asks for the first part of its weights before it waits for its rows: the
kernel before may leave memory idle, and at its end does.

**A row's result depends neither on the other rows nor on their number**, up to NARROW_ROWS: it is computed by
the same instructions in the same order. A layer of few outputs has several programs for each, as many as its
size asks for: the last one that is done adds up what all have, in the order of the inputs. With int8 a row's
result is that of any number of rows, since sums are exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import (
    begin_kernel,
    let_next_start,
    prefetch,
)
from executor_service.backends.torch_backend.cuda.launch.launch import Launch
from executor_service.backends.torch_backend.cuda.linear.pointwise import joined
from executor_service.backends.torch_backend.cuda.linear.tuning import BLOCKS, Tuning
from executor_service.backends.torch_backend.files.architecture.activation import Activation

MAX_ROWS = 4
"""Rows of a product of 8 bits, whose two digits have twice as many columns of a matrix instruction."""
NARROW_ROWS = 8
"""Rows of a product of 16 bits."""

FEW = Tuning(lines=NARROW_ROWS)
_TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int8: tl.int8}


@triton.jit
def ask_for_rows(weight, column, begin, n, k, asked: tl.constexpr):
    """Ask for `asked` lines of the cache of rows `column` of weight [n, k] each, from input `begin` on."""
    numbers: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # of a line
    rows = weight + tl.minimum(column, n - 1).to(tl.int64) * k
    prefetch(rows[:, None] + tl.minimum(begin + tl.arange(0, asked) * numbers, k - 1)[None, :])


@triton.jit
def sums_of_rows(
    sums, x, weight, column, there, line, real, begin, end, k, x_stride,
    inputs: tl.constexpr, factor: tl.constexpr,
):  # fmt: skip
    """sums + weight rows `column` [outputs] times the lines of x [lines], over inputs begin..end.

    That is whole tiles, but for the last inputs. Returns sums [outputs, lines].
    """
    w = weight + column.to(tl.int64) * k
    for first in range(begin, end, inputs):
        at = first + tl.arange(0, inputs)
        known = at < k
        factors = tl.load(w[:, None] + at[None, :], mask=there[:, None] & known[None, :], other=0.0)
        numbers = tl.load(
            x + line[None, :] * x_stride + at[:, None], mask=known[:, None] & real[None, :], other=0.0
        )
        sums = tl.dot(factors.to(factor), numbers.to(factor), sums, out_dtype=sums.dtype)
    return sums


@triton.jit
def halves(both, rounded: tl.constexpr):
    """The first and the second half of both [outputs, lines], rounded as a product's results are."""
    outputs: tl.constexpr = both.shape[0]
    apart = tl.reshape(both.to(rounded).to(tl.float32), [2, outputs // 2, both.shape[1]])
    return tl.split(tl.permute(apart, (1, 2, 0)))


@triton.jit
def _finish(
    out, bias, sums, column, place, there, real,
    biased: tl.constexpr, add: tl.constexpr, activation: tl.constexpr,
):  # fmt: skip
    """Store sums [outputs, lines] of weight rows `column` to `place` of out, or half as many with a gate."""
    if biased:
        sums += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[:, None]
    if activation >= 0:
        gate, up = halves(sums, out.dtype.element_ty)
        sums = joined(gate, up, activation, out.dtype.element_ty)
    if add:
        sums += tl.load(place, mask=real, other=0.0).to(tl.float32)
    tl.store(place, sums.to(out.dtype.element_ty), mask=real)


@triton.jit
def finish_parts(
    out, bias, partial, arrivals, sums, column, n, line, real, block, split,
    biased: tl.constexpr, add: tl.constexpr, activation: tl.constexpr, splits: tl.constexpr,
):  # fmt: skip
    """Store what a program's sums [outputs, lines] make of `out`, once all parts of the inputs are added up.

    column: the program's rows of the weight; real: which lines there are. A bias, a gate and what is in `out`
    with `add` come after the sum. Of a block's programs the last one that is done adds up what all have, in
    the order of the inputs. `block` counts those of all lines.
    """
    outputs: tl.constexpr = sums.shape[0]
    lines: tl.constexpr = sums.shape[1]
    width: tl.constexpr = outputs // 2 if activation >= 0 else outputs
    result = tl.program_id(0) * width + tl.arange(0, width)
    there = tl.program_id(0) * width + tl.arange(0, outputs) % width < n
    place, mask = out + line[None, :] * n + result[:, None], (result < n)[:, None] & real[None, :]
    if splits == 1:
        _finish(out, bias, sums, column, place, there, mask, biased, add, activation)
    else:
        step = tl.num_programs(0) * tl.num_programs(2) * (outputs * lines)
        number = tl.arange(0, outputs)[:, None] * lines + tl.arange(0, lines)[None, :]
        number = partial + block * (outputs * lines) + number
        tl.store(number + split * step, sums)
        tl.debug_barrier()  # all threads have stored before one of them counts the program as arrived
        if tl.atomic_add(arrivals + block, 1, sem="acq_rel", scope="gpu") == splits - 1:
            sums = tl.zeros([outputs, lines], tl.float32)
            for i in tl.static_range(splits):
                sums += tl.load(number + i * step)
            _finish(out, bias, sums, column, place, there, mask, biased, add, activation)
            tl.store(arrivals + block, 0)  # for the next launch


@triton.jit(do_not_specialize=("rows",))
def _few_rows_kernel(
    out, x, weight, bias, partial, arrivals, rows, n, k, x_stride, part,
    biased: tl.constexpr, add: tl.constexpr, activation: tl.constexpr,
    splits: tl.constexpr, asked: tl.constexpr,
    outputs: tl.constexpr, inputs: tl.constexpr, lines: tl.constexpr, factor: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, part of the inputs): x W^T of all rows, in fp32.

    Gates make n results of 2n rows of the weight: half of a block are gates, and half what they let through.
    """
    width: tl.constexpr = outputs // 2 if activation >= 0 else outputs
    block, split, output = tl.program_id(0), tl.program_id(1), tl.arange(0, outputs)
    column = block * width + output % width + output // width * n
    last_row = n * (outputs // width)
    begin, end = 0, k
    if splits > 1:
        begin = split * part
        end = tl.minimum(begin + part, k)
    ask_for_rows(weight, column, begin, last_row, k, asked)
    begin_kernel(late=activation >= 0)
    line = tl.arange(0, lines)
    there, real = block * width + output % width < n, line < rows
    sums = sums_of_rows(
        tl.zeros([outputs, lines], tl.float32), x, weight, column, there, line, real,
        begin, end, k, x_stride, inputs, factor,
    )  # fmt: skip
    if activation >= 0:
        let_next_start()
    finish_parts(
        out, bias, partial, arrivals, sums, column, n, line, real, block, split,
        biased, add, activation, splits,
    )  # fmt: skip


@triton.jit(do_not_specialize=("rows",))
def _few_scaled_rows_kernel(
    out, x, weight, x_scales, weight_scales, rows, n, k, x_stride,
    digits: tl.constexpr, asked: tl.constexpr, outputs: tl.constexpr, inputs: tl.constexpr,
    lines: tl.constexpr, factor: tl.constexpr, total: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs): x W^T of all rows, scaled as by `_scale_kernel`; sums have dtype `total`.

    The low digits of all rows follow their high digits in x. In the product, the lines of high digits are the
    first half and those of low digits the second one.
    """
    column = tl.program_id(0) * outputs + tl.arange(0, outputs)
    ask_for_rows(weight, column, 0, n, k, asked)
    begin_kernel()
    half: tl.constexpr = lines // 2
    line = tl.arange(0, lines)
    there, real = column < n, (line % half < rows) & (line < digits * half)
    sums = tl.zeros([outputs, lines], total)
    source = line // half * rows + line % half
    sums = sums_of_rows(
        sums, x, weight, column, there, source, real, 0, k, k, x_stride, inputs=inputs, factor=factor
    )
    high, low = tl.split(tl.permute(tl.reshape(sums, [outputs, 2, half]), (0, 2, 1)))
    wide = high.to(tl.float32)
    if digits == 2:
        wide = 256 * wide + low.to(tl.float32)
    row = tl.arange(0, half)
    mask = there[:, None] & (row < rows)[None, :]
    wide *= tl.load(x_scales + row, mask=row < rows, other=0.0)[None, :]
    wide *= tl.load(weight_scales + column, mask=there, other=0.0)[:, None]
    tl.store(out + row[None, :] * n + column[:, None], wide.to(out.dtype.element_ty), mask=mask)


def new_arrivals(device: torch.device) -> torch.Tensor:
    """How many programs of each block are done: int32, zero before and after each launch.

    Launches of one stream can share it, as nothing else of them overlaps.
    """
    return torch.zeros(BLOCKS, dtype=torch.int32, device=device)


def few_rows_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    arrivals: torch.Tensor,
    *,
    add: bool = False,
    activation: Activation | None = None,
    how: Tuning = FEW,
) -> Launch:
    """The launch of x W^T + bias, with `add` added to `out`, rounded once.

    x [rows, k] bf16 or fp16, of at most `how.lines` rows, with contiguous columns; weight [n, k] and bias
    [n], in x's dtype; out [rows, n], of any dtype. weight, bias and out are contiguous. `arrivals`: of
    `new_arrivals`. With an activation, weight and bias are those of gates, then of ups; out has half as many
    columns.
    """
    k = weight.shape[1]
    width = how.outputs if activation is None else how.outputs // 2
    blocks, size = -(-out.shape[1] // width), weight.element_size()
    inputs = how.tile_bytes // size
    splits, part = how.parts(blocks, -(-k // inputs))
    partial = arrivals  # not used
    if splits > 1:
        partial = torch.empty(splits * blocks * how.outputs * how.lines, dtype=torch.float32, device=x.device)
    return Launch(
        _few_rows_kernel,
        (blocks, splits, 1),
        {
            "out": out, "x": x, "weight": weight, "bias": weight if bias is None else bias,
            "partial": partial, "arrivals": arrivals,
            "rows": x.shape[0], "n": out.shape[1], "k": k, "x_stride": x.stride(0), "part": part * inputs,
        },
        {
            "biased": int(bias is not None), "add": int(add),
            "activation": -1 if activation is None else int(activation), "splits": splits,
            "asked": how.asked_lines(blocks * splits, min(part * inputs, k) * size),
            **tiles(weight, x.dtype, how),
        },
        **how.options,
    )  # fmt: skip


def few_scaled_rows_launch(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    out: torch.Tensor,
) -> Launch:
    """The launch of `Format.product` for at most MAX_ROWS rows.

    x [digits * rows, k] and weight [n, k], int8 or fp8; x_scales fp32 [rows, 1], weight_scales fp32 [1, n];
    out [rows, n]. All are contiguous. fp8 numbers are multiplied as fp16, which has all of them.
    """
    n, k = weight.shape
    exact = weight.dtype == torch.int8
    return Launch(
        _few_scaled_rows_kernel,
        (-(-n // FEW.outputs), 1, 1),
        {
            "out": out, "x": x, "weight": weight, "x_scales": x_scales, "weight_scales": weight_scales,
            "rows": x_scales.shape[0], "n": n, "k": k, "x_stride": x.stride(0),
        },
        {
            "digits": x.shape[0] // x_scales.shape[0], "total": tl.int32 if exact else tl.float32,
            "asked": FEW.asked_lines(-(-n // FEW.outputs), k * weight.element_size()),
            **tiles(weight, torch.int8 if exact else torch.float16),
        },
        **FEW.options,
    )  # fmt: skip


def tiles(weight: torch.Tensor, factor: torch.dtype, how: Tuning = FEW) -> dict[str, int]:
    """Constants that such kernels have; `factor`: the dtype of products."""
    return {
        "outputs": how.outputs, "inputs": how.tile_bytes // weight.element_size(), "lines": how.lines,
        "factor": _TRITON_TYPES[factor],
    }  # fmt: skip
