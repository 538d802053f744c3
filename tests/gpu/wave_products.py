"""Products of few rows in equal waves: what E13 tries in place of the shipped ones.

Dependent launches cost an 8B model time (E9, E11): the next kernel's many small programs start on whichever
multiprocessors are free first, so that some get most of them. Here a kernel has as many programs as the
device has multiprocessors, or a small multiple; each takes less than half of one, so that the next kernel's
all find room beside it and are spread evenly. It goes through its blocks of outputs in one loop, whose loads
ahead of use do not end between two blocks. It lets the next kernel start some tiles before its own end: then
the first weights of that one come while this one's last sums are made.

Not measured yet: no GPU was at hand since it was written. Interpreted, it is right (tests/triton).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import _is_dependent
from executor_service.backends.torch_backend.cuda.launch.launch import Launch, power_of_two
from executor_service.backends.torch_backend.cuda.linear.pointwise import joined
from executor_service.backends.torch_backend.cuda.linear.skinny_gemm import ask_for_rows, halves, tiles
from executor_service.backends.torch_backend.cuda.linear.tuning import BLOCKS, Tuning
from executor_service.backends.torch_backend.files.architecture.activation import Activation

_MOST_SPLITS = 8
_LINE_BYTES = 128  # of the cache
_GAIN = 0.97  # of the tiles that the busiest program has: what another split has to save


@dataclass(frozen=True, slots=True)
class Waves:
    """How a product is cut. A result's bits depend on `tile_bytes`, on `processors` and on its layer."""

    processors: int = 132
    resident: int = 1
    """Programs of one multiprocessor; together they must leave half of it to the next kernel."""
    outputs: int = 16
    lines: int = 8  # rows, padded
    tile_bytes: int = 512  # of a weight row
    stages: int = 10
    warps: int = 4
    late: int = 0
    """The next kernel may start so many tiles before the end; 0: once this one has waited, -1: at once."""
    asked_bytes: int = 0  # of a product's weights, before it waits

    def parts(self, blocks: int, tiles: int) -> tuple[int, int]:
        """Parts of a product's inputs, and tiles of each, so that the busiest program has least to do."""
        programs, found = self.processors * self.resident, (0.0, 1, tiles)
        for splits in range(1, _MOST_SPLITS + 1 if blocks <= BLOCKS else 2):
            part = -(-tiles // splits)
            if (splits > 1 and part < 2) or (splits - 1) * part >= tiles:
                continue
            cost = -(-blocks * splits // programs) * (part + 1)
            if splits == 1 or cost < found[0] * _GAIN:
                found = float(cost), splits, part
        return found[1:]


@triton.jit
def _let_next_start(left):
    """Let the next kernel start where `left` is 0."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $1, 0; @p griddepcontrol.launch_dependents; mov.b32 $0, 0; }",
        "=r,r", [left], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _store(
    out, sums, n, block, line, real, add: tl.constexpr, activation: tl.constexpr
):  # fmt: skip
    """Store the sums [outputs, lines] of a block, gated and added to what is in `out`."""
    width: tl.constexpr = sums.shape[0] // 2 if activation >= 0 else sums.shape[0]
    result = block * width + tl.arange(0, width)
    place, mask = out + line[None, :] * n + result[:, None], (result < n)[:, None] & real[None, :]
    if activation >= 0:
        gate, up = halves(sums, out.dtype.element_ty)
        sums = joined(gate, up, activation, out.dtype.element_ty)
    if add:
        sums += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("rows",))
def _waves_kernel(
    out, x, weight, partial, arrivals, rows, n, k, x_stride,
    add: tl.constexpr, activation: tl.constexpr, splits: tl.constexpr, part: tl.constexpr,
    late: tl.constexpr, asked: tl.constexpr,
    outputs: tl.constexpr, inputs: tl.constexpr, lines: tl.constexpr, factor: tl.constexpr,
):  # fmt: skip
    """Program p: of the pairs (block of outputs, part of the inputs) the p-th, and so on by the grid."""
    width: tl.constexpr = outputs // 2 if activation >= 0 else outputs
    first, programs = tl.program_id(0), tl.num_programs(0)
    blocks = (n + width - 1) // width
    output, line = tl.arange(0, outputs), tl.arange(0, lines)
    real = line < rows
    if asked:
        column = first % blocks * width + output % width + output // width * n
        ask_for_rows(weight, column, first // blocks * (part * inputs), n * (outputs // width), k, asked)
    if _is_dependent():
        if late == -1:
            gdc_launch_dependents()
        gdc_wait()
        if late == 0:
            gdc_launch_dependents()
    tiles = (blocks * splits - first + programs - 1) // programs * part
    sums = tl.zeros([outputs, lines], tl.float32)
    for t in range(tiles):
        # Addresses follow from t alone: what followed from an earlier tile could not be loaded ahead.
        item, tile = first + t // part * programs, t % part
        block, split = item % blocks, item // blocks
        column = block * width + output % width + output // width * n
        at = (split * part + tile) * inputs + tl.arange(0, inputs)
        there, known = block * width + output % width < n, at < k
        factors = tl.load(
            weight + column.to(tl.int64)[:, None] * k + at[None, :],
            mask=there[:, None] & known[None, :], other=0.0,
        )  # fmt: skip
        numbers = tl.load(
            x + line[None, :] * x_stride + at[:, None], mask=known[:, None] & real[None, :], other=0.0
        )
        sums = tl.dot(factors.to(factor), numbers.to(factor), sums, out_dtype=tl.float32)
        if _is_dependent():  # noqa: SIM102  # Triton evaluates these one by one
            if late > 0:
                _let_next_start(tiles - late - t)
        if tile == part - 1:
            if splits == 1:
                _store(out, sums, n, block, line, real, add, activation)
            else:
                number = partial + (split * blocks + block) * (outputs * lines)
                tl.store(number + output[:, None] * lines + line[None, :], sums)
            sums = tl.zeros([outputs, lines], tl.float32)
    if splits > 1:
        tl.debug_barrier()  # all threads have stored before one of them counts a part as arrived
        for item in range(first, blocks * splits, programs):
            block = item % blocks
            if tl.atomic_add(arrivals + block, 1, sem="acq_rel", scope="gpu") == splits - 1:
                number = partial + block * (outputs * lines) + output[:, None] * lines + line[None, :]
                total = tl.zeros([outputs, lines], tl.float32)
                for i in tl.static_range(splits):
                    total += tl.load(number + i * blocks * (outputs * lines))
                _store(out, total, n, block, line, real, add, activation)
                tl.store(arrivals + block, 0)  # for the next launch


def waves_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    arrivals: torch.Tensor,
    *,
    add: bool = False,
    activation: Activation | None = None,
    how: Waves,
) -> Launch:
    """As `few_rows_launch`; without biases."""
    assert bias is None
    n, k = out.shape[1], weight.shape[1]
    width = how.outputs if activation is None else how.outputs // 2
    blocks, size = -(-n // width), weight.element_size()
    constants = tiles(weight, x.dtype, Tuning(how.outputs, how.lines, how.tile_bytes))
    splits, part = how.parts(blocks, -(-k // constants["inputs"]))
    programs = min(how.processors * how.resident, blocks * splits)
    partial = arrivals  # not used
    if splits > 1:
        partial = torch.empty(splits * blocks * how.outputs * how.lines, dtype=torch.float32, device=x.device)
    asked = min(how.asked_bytes // (programs * how.outputs), min(part * constants["inputs"], k) * size)
    return Launch(
        _waves_kernel,
        (programs, 1, 1),
        {
            "out": out, "x": x, "weight": weight, "partial": partial, "arrivals": arrivals,
            "rows": x.shape[0], "n": n, "k": k, "x_stride": x.stride(0),
        },
        {
            "add": int(add), "activation": -1 if activation is None else int(activation),
            "splits": splits, "part": part, "late": how.late,
            "asked": power_of_two(max(asked // _LINE_BYTES, 1) + 1) // 2 if asked else 0, **constants,
        },
        warps=how.warps,
        stages=how.stages,
    )  # fmt: skip
