"""Matrix products over weights of 4 bits in Triton, as `PackedWeight` holds them: of few rows, and of tiles.

A number is a code from 0 to 15 less a zero point, times a scale, or plus a minimum: those of a group of
columns. Codes become bf16 by their bits alone: 0x4300 | code is 128 + code, so a code less its zero point is
one subtraction, and exact. A group's sum is scaled in fp32, so no weight is rounded. What minima add is the
sum of the rows' numbers times the minimum, which matrix instructions multiply as two numbers of 8 bits.

Programs read whole pieces of memory: 64 rows of the weight have the codes of a span of columns in one piece,
the lower halves of its bytes before the upper ones. **A row's result depends neither on the other rows nor on
their number**, up to FEW_ROWS, and from there to TILED_ROWS. Products of more rows are those of bf16, of a
copy that `unpack_launch` makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import (
    begin_kernel,
    let_next_start,
    prefetch,
)
from executor_service.backends.torch_backend.cuda.launch.launch import Launch, power_of_two
from executor_service.backends.torch_backend.cuda.linear.skinny_gemm import MAX_ROWS, finish_parts
from executor_service.backends.torch_backend.files.architecture.activation import Activation

FEW_ROWS = MAX_ROWS
TILED_ROWS = 128
"""Beyond it, a copy in bf16 and cuBLAS's product of it are estimated to take less time."""
BLOCK = tl.constexpr(64)  # rows of the weight whose codes lie together
INPUTS = 128  # columns that a program multiplies at once; spans have at most as many
_ZERO_BITS = tl.constexpr(31)  # of a group's word: its zero point; the others are those of its scale in fp32
_MOST_LINES = 32
_PROGRAMS_TO_FILL = 512  # a device: four for each multiprocessor
_LEAST_TILES = 2  # of weights, that a program has
_ASKED_SPANS = 8


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [n, k] of 4 bits, in blocks of BLOCK rows and spans of columns, filled up with zeros."""

    n: int
    k: int
    span: int  # columns: a power of two from 32 to INPUTS
    spans: int  # of a group
    codes: torch.Tensor  # uint8 [blocks, spans of k, BLOCK, span / 2]
    words: torch.Tensor  # int32 [blocks, groups, BLOCK]: scales, in whose last bits the zero points are
    minima: torch.Tensor | None  # fp32, as `words`

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.codes.nbytes + self.words.nbytes + (0 if self.minima is None else self.minima.nbytes)


def _is_compiled(_semantic: Any = None) -> Any:
    """Whether a kernel is compiled: the interpreter has no arithmetic of bf16."""
    return tl.constexpr(_semantic is not None)


setattr(_is_compiled, tl.core.TRITON_BUILTIN, True)  # the compiler calls it, and passes `_semantic`


@triton.jit
def _numbers(codes, zero):
    """Codes of 4 bits [outputs, inputs] + 128 less their zero points + 128 [outputs]: exact in bf16."""
    above = (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    if _is_compiled():
        return above - zero[:, None]
    return (above.to(tl.float32) - zero.to(tl.float32)[:, None]).to(tl.bfloat16)


@triton.jit
def _zero(words):
    """The zero points + 128 of groups, in bf16."""
    return ((words & _ZERO_BITS) | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _scale(words):
    """The scales of groups, in fp32."""
    return (words & ~_ZERO_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _stored(column, last):
    """Rows `column` of a weight of `last` rows; those after the last block are in it."""
    return tl.minimum(column, tl.cdiv(last, BLOCK) * BLOCK - 1)


@triton.jit
def _codes(weight, stored, spans, half: tl.constexpr):
    """Where the codes of rows `stored` are, in their first span."""
    return weight + (stored // BLOCK).to(tl.int64) * spans * (BLOCK * half) + stored % BLOCK * half


@triton.jit
def ask_for_spans(weight, column, last, first, spans, half: tl.constexpr, asked: tl.constexpr):
    """Ask for the codes of `asked` spans of rows `column` each, from span `first` on."""
    codes = _codes(weight, _stored(column, last), spans, half)
    prefetch(codes[:, None] + tl.minimum(first + tl.arange(0, asked), spans - 1)[None, :] * (BLOCK * half))


@triton.jit(do_not_specialize=("rows",))
def _packed_rows_kernel(
    out, x, weight, words, minima, bias, partial, arrivals, rows, n, k, spans, groups, x_stride,
    least: tl.constexpr, biased: tl.constexpr, add: tl.constexpr, activation: tl.constexpr,
    splits: tl.constexpr, part: tl.constexpr, asked: tl.constexpr,
    outputs: tl.constexpr, inputs: tl.constexpr, lines: tl.constexpr,
    span: tl.constexpr, per_group: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, part of the inputs, some rows): x W^T, as `_few_rows_kernel` has it."""
    width: tl.constexpr = outputs // 2 if activation >= 0 else outputs
    half: tl.constexpr = span // 2
    block, split, output = tl.program_id(0), tl.program_id(1), tl.arange(0, outputs)
    column = block * width + output % width + output // width * n
    begin, end = 0, spans * span
    if splits > 1:
        begin = split * part
        end = tl.minimum(begin + part, end)
    ask_for_spans(weight, column, n * (outputs // width), begin // span, spans, half, asked)
    begin_kernel(late=activation >= 0)
    stored = _stored(column, n * (outputs // width))
    codes = _codes(weight, stored, spans, half)
    word = stored // BLOCK * groups * BLOCK + stored % BLOCK
    line, at = tl.program_id(2) * lines + tl.arange(0, lines), tl.arange(0, half)
    real = line < rows
    sums = tl.zeros([outputs, lines], tl.float32)
    for first in range(begin, end, inputs):
        for piece in tl.static_range(inputs // span):
            number = first // span + piece
            both = tl.load(codes[:, None] + number * (BLOCK * half) + at[None, :])
            group = tl.load(words + word + number // per_group * BLOCK)
            source, before = x + line[None, :] * x_stride + (first + piece * span + at)[:, None], at[:, None]
            before += first + piece * span
            low = tl.load(source, mask=(before < k) & real[None, :], other=0.0)
            high = tl.load(source + half, mask=(before + half < k) & real[None, :], other=0.0)
            products = tl.dot(_numbers(both & 15, _zero(group)), low)
            products = tl.dot(_numbers(both >> 4, _zero(group)), high, products)
            sums += products * _scale(group)[:, None]
            if least:
                minimum = tl.load(minima + word + number // per_group * BLOCK)[:, None]
                minimum = tl.broadcast_to(minimum, [outputs, half])
                leading = minimum.to(tl.bfloat16)
                rest = (minimum - leading.to(tl.float32)).to(tl.bfloat16)
                sums = tl.dot(rest, high, tl.dot(rest, low, sums))
                sums = tl.dot(leading, high, tl.dot(leading, low, sums))
    if activation >= 0:
        let_next_start()
    finish_parts(
        out, bias, partial, arrivals, sums, column, n, line, real,
        tl.program_id(2) * tl.num_programs(0) + block, split, biased, add, activation, splits,
    )  # fmt: skip


@triton.jit
def _unpack_kernel(
    out, weight, words, minima, n, k, spans, groups,
    least: tl.constexpr, span: tl.constexpr, per_group: tl.constexpr,
):  # fmt: skip
    """Program (span, block of rows): the numbers of a matrix, rounded to out's dtype, [n, k]."""
    begin_kernel()
    half: tl.constexpr = span // 2
    number, block, row = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    at = tl.arange(0, half)
    codes = weight + (block.to(tl.int64) * spans + number) * (BLOCK * half)
    both = tl.load(codes + row[:, None] * half + at[None, :])
    where = (block * groups + number // per_group) * BLOCK + row
    group = tl.load(words + where)
    line, column = block * BLOCK + row, number * span + at
    place = out + line.to(tl.int64)[:, None] * k + column[None, :]
    for upper in tl.static_range(2):
        code = both >> 4 if upper else both & 15
        values = _numbers(code, _zero(group)).to(tl.float32) * _scale(group)[:, None]
        if least:
            values += tl.load(minima + where)[:, None]
        mask = (line < n)[:, None] & (column + upper * half < k)[None, :]
        tl.store(place + upper * half, values.to(out.dtype.element_ty), mask=mask)


def packed_rows_launch(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    arrivals: torch.Tensor,
    *,
    add: bool = False,
    activation: Activation | None = None,
) -> Launch:
    """The launch of x W^T + bias of up to TILED_ROWS rows in bf16, as `few_rows_launch` has it."""
    few, n, rows = len(x) <= FEW_ROWS, out.shape[1], len(x)
    outputs = 32 if few else 64
    lines = 8 if few else min(max(power_of_two(rows), 16), _MOST_LINES)
    blocks, tiles = -(-n // (outputs if activation is None else outputs // 2)), -(-weight.k // INPUTS)
    above = -(-rows // lines)
    wanted = (_PROGRAMS_TO_FILL * 32 // outputs) // blocks
    part = -(-tiles // max(min(wanted, tiles // _LEAST_TILES), 1))
    splits, spans = -(-tiles // part), weight.codes.shape[1]
    partial = arrivals  # not used
    if splits > 1:
        partial = torch.empty(splits * above * blocks * outputs * lines, dtype=torch.float32, device=x.device)
    return Launch(
        _packed_rows_kernel,
        (blocks, splits, above),
        {
            "out": out, "x": x, "bias": out if bias is None else bias, "partial": partial,
            "arrivals": arrivals, "rows": rows, "n": n, "k": weight.k, "x_stride": x.stride(0),
            **_arguments(weight),
        },
        {
            **_constants(weight), "biased": int(bias is not None), "add": int(add),
            "activation": -1 if activation is None else int(activation), "splits": splits,
            "part": part * INPUTS, "asked": min(_ASKED_SPANS, power_of_two(spans)), "outputs": outputs,
            "inputs": INPUTS, "lines": lines,
        },
        warps=outputs // 16,
        stages=6 if few else 4,
    )  # fmt: skip


def unpack_launch(weight: PackedWeight, out: torch.Tensor) -> Launch:
    """The launch that dequantizes a weight to out [n, k], contiguous."""
    spans = -(-weight.k // weight.span)
    return Launch(
        _unpack_kernel,
        (spans, len(weight.codes), 1),
        {"out": out, "n": weight.n, "k": weight.k, **_arguments(weight)},
        _constants(weight),
        warps=4,
        stages=1,
    )


def _arguments(weight: PackedWeight) -> dict[str, torch.Tensor | int | float]:
    words, minima = weight.words, weight.minima
    return {
        "weight": weight.codes, "words": words, "minima": words if minima is None else minima,
        "spans": weight.codes.shape[1], "groups": words.shape[1],
    }  # fmt: skip


def _constants(weight: PackedWeight) -> dict[str, int]:
    return {"least": int(weight.minima is not None), "span": weight.span, "per_group": weight.spans}
