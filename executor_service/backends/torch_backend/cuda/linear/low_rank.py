"""What adapters change in a linear layer, in two Triton kernels for all adapters of a step.

`shrink` multiplies the tokens with A, `expand` the results with B, and adds them to the layer's results: the
idea of SGMV (Chen et al. 2023, Punica). A tile has up to 16 tokens of one slot (see `adapted_tokens`); the
programs of a tile find the factors through the slot table, which has their addresses. So a CUDA graph stays
right when another adapter comes to a slot: nothing but the table's contents changes.

The parts of a stack (queries, keys and values, or gates and ups) are shrunk in one launch and expanded in
one. Each has factors of its own, so that an adapter that leaves out some of them costs nothing there.

**A token's change does not depend on the other tokens**: A is cut into pieces of a fixed number of inputs,
and their sums are added in the order of the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel
from executor_service.backends.torch_backend.cuda.launch.launch import Launch
from executor_service.backends.torch_backend.cuda.layout.adapted_tokens import (
    TILE_FIELDS,
    TILE_TOKENS,
    AdaptedTokens,
)
from executor_service.backends.torch_backend.ops.low_rank import PART_NAMES, STACKS, LayerChanges
from executor_service.contract.limits import MAX_ADAPTER_RANK

RECORD_FIELDS = 8
"""int64s of a record of the slot table, one for each part of each layer: the addresses of A and B, the padded
rank (0: the adapter does not change this part), the bits of the scale in fp32, the part's first output among
those of its stack, and its number of outputs.
"""
RANK_TILE = 16
"""Ranks are padded with zeros to a multiple of this."""

_PIECE = 2048  # inputs of a program of `shrink`
_RANKS = 32  # computed at once
_SPLITS = 2  # programs of `shrink` that share the ranks of a part, so that high ones take less long
_COLUMNS = 128  # outputs of a program of `expand`
_INPUTS, _INPUTS_FP32 = 128, 32  # multiplied at once by `shrink`: in fp32 more would not fit into registers
_RESIDENT = 4  # programs of a multiprocessor


@triton.jit(do_not_specialize=("tokens", "tiles", "count", "record", "places"))
def _shrink_kernel(
    shrunk, x, table, tokens, tiles, count, record, places, slot_stride, k,
    parts: tl.constexpr, max_rank: tl.constexpr, piece: tl.constexpr, inputs: tl.constexpr,
    ranks: tl.constexpr, splits: tl.constexpr, lines: tl.constexpr, record_fields: tl.constexpr,
    tile_fields: tl.constexpr,
):  # fmt: skip
    """Program p: of the step's units, (tile, part, split, piece of inputs), the p-th, and so on by the grid.

    A split has every `splits`-th group of ranks. x [tokens, k]; shrunk fp32 [pieces, places, parts,
    max_rank]. `record`: the number of the first part's.
    """
    begin_kernel()
    line, rank, column = tl.arange(0, lines), tl.arange(0, ranks), tl.arange(0, inputs)
    pieces = tl.cdiv(k, piece)
    units = parts * splits * pieces
    for work in range(tl.program_id(0), tl.load(count) * units, tl.num_programs(0)):
        tile = tiles + work // units * tile_fields
        first, size, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        unit = work % units
        part, split, number = unit // (splits * pieces), unit // pieces % splits, unit % pieces
        entry = table + slot.to(tl.int64) * slot_stride + (record + part) * record_fields
        padded_rank = tl.load(entry + 2).to(tl.int32)
        begin = number * piece
        end = tl.minimum(begin + piece, k)
        real = line < size
        for first_rank in range(split * ranks, padded_rank, splits * ranks):
            here = first_rank + rank < padded_rank
            token = tl.load(tokens + first + line, mask=real, other=0).to(tl.int64)
            a = tl.multiple_of(tl.load(entry).to(tl.pointer_type(x.dtype.element_ty)), 16)
            a += (first_rank + rank)[None, :].to(tl.int64) * k
            sums = tl.zeros([lines, ranks], tl.float32)
            for start in range(begin, end, inputs):
                at = start + column
                known = at < k
                numbers = tl.load(
                    x + token[:, None] * k + at[None, :], mask=real[:, None] & known[None, :], other=0.0
                )
                factors = tl.load(a + at[:, None], mask=known[:, None] & here[None, :], other=0.0)
                sums = tl.dot(numbers, factors, sums, input_precision="ieee")
            place = (number * places + first + line).to(tl.int64) * parts + part
            target = shrunk + place[:, None] * max_rank + (first_rank + rank)[None, :]
            tl.store(target, sums, mask=real[:, None] & here[None, :])


@triton.jit(do_not_specialize=("tokens", "tiles", "count", "record", "places"))
def _expand_kernel(
    out, shrunk, table, tokens, tiles, count, record, places, slot_stride, n, out_stride, pieces,
    parts: tl.constexpr, max_rank: tl.constexpr, columns: tl.constexpr, ranks: tl.constexpr,
    lines: tl.constexpr, record_fields: tl.constexpr, tile_fields: tl.constexpr, factor: tl.constexpr,
):  # fmt: skip
    """Program p: of the step's units, (tile, columns of the results), the p-th, and so on by the grid.

    out [tokens, n], with `out_stride` between tokens; `factor`: the dtype of B.
    """
    begin_kernel()
    line, rank = tl.arange(0, lines), tl.arange(0, ranks)
    blocks = tl.cdiv(n, columns)
    for work in range(tl.program_id(0), tl.load(count) * blocks, tl.num_programs(0)):
        tile = tiles + work // blocks * tile_fields
        first, size, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        begin = work % blocks * columns
        column = begin + tl.arange(0, columns)
        real = line < size
        total = tl.zeros([lines, columns], tl.float32)
        changed = 0
        for part in tl.static_range(parts):
            entry = table + slot.to(tl.int64) * slot_stride + (record + part) * record_fields
            padded_rank = tl.multiple_of(tl.load(entry + 2).to(tl.int32), 16)
            first_output = tl.load(entry + 4).to(tl.int32)
            end_output = first_output + tl.load(entry + 5).to(tl.int32)
            if (padded_rank > 0) & (begin < end_output) & (begin + columns > first_output):
                changed = 1
                inside = (column >= first_output) & (column < end_output)
                b = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(factor)), 16)
                b += (column - first_output)[None, :].to(tl.int64) * padded_rank
                scale = tl.load(entry + 3).to(tl.int32).to(tl.float32, bitcast=True)
                for first_rank in range(0, padded_rank, ranks):
                    at = first_rank + rank
                    here = at < padded_rank
                    inner = tl.zeros([lines, ranks], tl.float32)
                    for piece in range(pieces):
                        place = (piece * places + first + line).to(tl.int64) * parts + part
                        inner += tl.load(
                            shrunk + place[:, None] * max_rank + at[None, :],
                            mask=real[:, None] & here[None, :], other=0.0,
                        )  # fmt: skip
                    factors = tl.load(b + at[:, None], mask=here[:, None] & inside[None, :], other=0.0)
                    total = tl.dot((inner * scale).to(factor), factors, total, input_precision="ieee")
        if changed > 0:
            token = tl.load(tokens + first + line, mask=real, other=0).to(tl.int64)
            target = out + token[:, None] * out_stride + column[None, :]
            mask = real[:, None] & (column < n)[None, :]
            result = tl.load(target, mask=mask, other=0.0).to(tl.float32) + total
            tl.store(target, result.to(out.dtype.element_ty), mask=mask)


_TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class TableChange:
    """What the adapters of a slot table change in one linear layer: a `LinearChange`."""

    rows: AdaptedTokens
    table: torch.Tensor  # int64 [slots, records, RECORD_FIELDS]
    record: int  # of the layer's first part
    parts: int

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """As `LinearChange.add`; x has the dtype of the factors. Nothing is read back."""
        x = x.contiguous()
        pieces = -(-x.shape[1] // _PIECE)
        shape = pieces, len(self.rows.tokens), self.parts, MAX_ADAPTER_RANK
        shrunk = torch.empty(shape, dtype=torch.float32, device=x.device)
        for launch in self.launches(x, out, shrunk):
            launch.run()

    def launches(self, x: torch.Tensor, out: torch.Tensor, shrunk: torch.Tensor) -> tuple[Launch, Launch]:
        """The two launches; shrunk fp32 [pieces, tokens, parts, MAX_ADAPTER_RANK]."""
        rows, (pieces, places) = self.rows, shrunk.shape[:2]
        (k, n), tiles = (x.shape[1], out.shape[1]), len(rows.tiles) // TILE_FIELDS
        units = self.parts * _SPLITS * pieces
        inputs = _INPUTS_FP32 if x.dtype == torch.float32 else _INPUTS
        arguments: dict[str, torch.Tensor | int | float] = {
            "shrunk": shrunk, "table": self.table, "tokens": rows.tokens, "tiles": rows.tiles,
            "count": rows.count, "record": self.record, "places": places, "slot_stride": self.table.stride(0),
        }  # fmt: skip
        constants = {
            "parts": self.parts, "max_rank": MAX_ADAPTER_RANK, "ranks": _RANKS, "lines": TILE_TOKENS,
            "record_fields": RECORD_FIELDS, "tile_fields": TILE_FIELDS,
        }  # fmt: skip
        shrink = Launch(
            _shrink_kernel,
            (self._programs(tiles * units), 1, 1),
            {**arguments, "x": x, "k": k},
            {**constants, "splits": _SPLITS, "piece": _PIECE, "inputs": inputs},
            warps=4,
            stages=3,
        )
        expand = Launch(
            _expand_kernel,
            (self._programs(tiles * -(-n // _COLUMNS)), 1, 1),
            {**arguments, "out": out, "n": n, "out_stride": out.stride(0), "pieces": pieces},
            {**constants, "columns": _COLUMNS, "factor": _TRITON_TYPES[x.dtype]},
            warps=4,
            stages=2,
        )
        return shrink, expand

    def _programs(self, units: int) -> int:
        return min(units, self.rows.processors * _RESIDENT) if self.rows.processors else units


@dataclass(frozen=True, slots=True)
class TableChanges:
    """The `StepChanges` of a slot table."""

    rows: AdaptedTokens
    table: torch.Tensor

    def of_layer(self, layer: int) -> LayerChanges:
        record, changes = layer * len(PART_NAMES), []
        for names in STACKS.values():
            changes.append(TableChange(self.rows, self.table, record, len(names)))
            record += len(names)
        return LayerChanges(*changes)
