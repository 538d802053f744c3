"""Linear layers over weights that stay in blocks, times activations in blocks of int8."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.gemm.block_layout import (
    BLOCK,
    OFFSET,
    ROW_BLOCK_BYTES,
    STEP,
    Layout,
)
from executor_service.backends.torch_backend.cpu.gemm.block_products import KINDS, LAYOUTS
from executor_service.backends.torch_backend.cpu.gemm.low_rank import ShrinkRowsFp32
from executor_service.backends.torch_backend.cpu.gemm.quantize_blocks import QuantizeBlocks
from executor_service.backends.torch_backend.cpu.layers.threaded_linear import (
    NO_ROW_CHANGES,
    Operand,
    RowChanges,
    Scratch,
    ThreadedGated,
    ThreadedLinear,
)
from executor_service.backends.torch_backend.cpu.primitives.records import Address, Record
from executor_service.backends.torch_backend.cpu.primitives.registers import CONVERTS_FP16, LANES
from executor_service.backends.torch_backend.cpu.threads.thread_pool import ThreadPool
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers

Bytes = NDArray[np.uint8]
Scales = NDArray[np.floating]

_STEPS = BLOCK // STEP
_PACKED_AT_ONCE = 256 * LANES  # rows of W, so that packing takes little memory beside the result


def is_supported(weight: ScaledNumbers) -> bool:
    """Whether there are products of these numbers: int8, in groups of 16, or of a multiple of 32."""
    size = weight.group_size
    in_groups = size is not None and (size == BLOCK // 2 or size % BLOCK == 0)
    return weight.numbers.dtype == torch.int8 and in_groups and weight.shape[1] % BLOCK == 0


def layout_of(parts: Sequence[ScaledNumbers]) -> Layout:
    """The smallest layout that holds all parts as they are."""
    minima = any(part.minima is not None for part in parts)
    bounds = [part.numbers.aminmax() for part in parts]
    low, high = min(int(one.min) for one in bounds), max(int(one.max) for one in bounds)
    fits = low >= 0 and high < 2 * OFFSET if minima else low >= -OFFSET and high < OFFSET
    wide = not CONVERTS_FP16 or not all(map(_fits_fp16, parts))
    group = BLOCK // 2 if any(part.group_size == BLOCK // 2 for part in parts) else BLOCK
    holding = (
        one
        for one in LAYOUTS
        if ((fits and minima == one.minima) or not one.nibbles)
        and (one.minima or not minima)
        and (one.wide or not wide)
        and one.group <= group
    )
    return min(holding, key=lambda one: one.block_bytes)


def _fits_fp16(part: ScaledNumbers) -> bool:
    scales = [part.scales] if part.minima is None else [part.scales, part.minima]
    return all(torch.equal(one.half().float(), one) for one in scales)


class _Rows:
    """The layout of quantized rows of k numbers, and their memory."""

    def __init__(self, k: int, scratch: Scratch) -> None:
        self.k, self._blocks, self._scratch = k, k // BLOCK, scratch

    def quantized(self, rows: int, x: Address) -> tuple[Record, Operand]:
        """The call that quantizes rows, and its result as the operand of a product."""
        stride = self._blocks * ROW_BLOCK_BYTES
        out = self._scratch.address(rows * stride)
        return QuantizeBlocks(rows, x, out, self.k), Operand(rows, out, stride, self._blocks)


class BlockLinear(ThreadedLinear):
    """x W^T + b, with W [n, k] given as parts that follow each other in n."""

    def __init__(
        self,
        parts: Sequence[ScaledNumbers],
        bias: torch.Tensor | None,
        pool: ThreadPool,
        scratch: Scratch,
    ) -> None:
        self._layout = layout_of(parts)
        super().__init__(sum(part.shape[0] for part in parts), pack(parts, self._layout), bias, pool)
        self._x = _Rows(parts[0].shape[1], scratch)

    def calls(
        self, rows: int, x: Address, out: Address, add: bool, change: RowChanges = NO_ROW_CHANGES
    ) -> list[Record]:
        """What adapters read, quantization of the rows, the bias if any, and the product."""
        shrink = change.shrink(ShrinkRowsFp32, x, self._x.k)
        quantize, operand = self._x.quantized(rows, x)
        return [*shrink, quantize, *self._product(KINDS[self._layout].multiply, operand, out, add, change)]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W, dequantized, fp32 [ids, k]."""
        return unpack_rows(self._panels, self._layout, ids)


class BlockGated(ThreadedGated):
    """activation(x G^T) * (x U^T)."""

    def __init__(
        self,
        gate: ScaledNumbers,
        up: ScaledNumbers,
        activation: Activation,
        pool: ThreadPool,
        scratch: Scratch,
    ) -> None:
        self._layout = layout_of((gate, up))
        panels = pack([gate], self._layout), pack([up], self._layout)
        super().__init__(gate.shape[0], *panels, activation, pool)
        self._x = _Rows(gate.shape[1], scratch)

    def calls(self, rows: int, x: Address, out: Address, change: RowChanges = NO_ROW_CHANGES) -> list[Record]:
        """What adapters read, quantization of the rows, and the product."""
        shrink = change.shrink(ShrinkRowsFp32, x, self._x.k)
        quantize, operand = self._x.quantized(rows, x)
        return [*shrink, quantize, self._product(KINDS[self._layout].gated, operand, out, change)]


def pack(parts: Sequence[ScaledNumbers], layout: Layout) -> torch.Tensor:
    """Parts [n_i, k], one after the other, to panels: bytes [ceil(n / 16), blocks * block_bytes].

    The last panel is padded with zeros.
    """
    n, k = sum(part.shape[0] for part in parts), parts[0].shape[1]
    blocks = k // BLOCK
    panels = torch.zeros(-(-n // LANES), blocks, layout.block_bytes, dtype=torch.uint8)
    for first in range(0, n, _PACKED_AT_ONCE):
        some = _rows_of(parts, first, min(first + _PACKED_AT_ONCE, n))
        count = -(-sum(part.shape[0] for part in some) // LANES)
        _pack_some(some, layout, panels[first // LANES : first // LANES + count])
    return panels.flatten(1)


def _rows_of(parts: Sequence[ScaledNumbers], first: int, end: int) -> list[ScaledNumbers]:
    """The rows `first` to `end` - 1 of all parts, one after the other."""
    found, before = [], 0
    for part in parts:
        n = part.shape[0]
        low, high = max(first - before, 0), min(end - before, n)
        if low < high:
            found.append(part.part(slice(low, high)) if (low, high) != (0, n) else part)
        before += n
    return found


def _pack_some(parts: Sequence[ScaledNumbers], layout: Layout, panels: torch.Tensor) -> None:
    """Write panels [panels, blocks, block_bytes]."""
    count, blocks, _ = panels.shape

    def padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = torch.cat(list(rows)) if len(rows) > 1 else rows[0]
        missing = count * LANES - len(whole)
        return torch.nn.functional.pad(whole, (0, 0, 0, missing)) if missing else whole

    numbers = padded([part.numbers for part in parts]).view(count, LANES, blocks, _STEPS, STEP)
    steps = numbers.permute(0, 2, 3, 1, 4)  # [panels, blocks, steps, columns, k of a step]
    codes = panels[..., : layout.codes_bytes].view(count, blocks, -1, LANES, STEP)
    if layout.nibbles:
        unsigned = (steps if layout.minima else steps + OFFSET).to(torch.uint8)
        codes.copy_(unsigned[:, :, 0::2] | unsigned[:, :, 1::2] << 4)
    else:
        codes.copy_(steps.view(torch.uint8))
    scales, minima = _scales_of(panels.numpy(), layout)
    torch.from_numpy(scales).copy_(
        padded([_by_group(part, part.scales, layout) for part in parts])
        .view(count, LANES, blocks, -1)
        .permute(0, 2, 3, 1)
    )
    if minima is not None:
        found = [torch.zeros_like(part.scales) if part.minima is None else part.minima for part in parts]
        wanted = padded([_by_group(part, one, layout) for part, one in zip(parts, found, strict=True)])
        torch.from_numpy(minima).copy_(wanted.view(count, LANES, blocks, -1).permute(0, 2, 3, 1))


def _by_group(part: ScaledNumbers, values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Scales or minima [n, groups of the part] for the layout's groups."""
    groups = part.groups[:: layout.group]
    return values if len(groups) == values.shape[1] else values[:, groups]


def _scales_of(panels: Bytes, layout: Layout) -> tuple[Scales, Scales | None]:
    """Views of the scales [panels, blocks, groups, 16], and of the minima if any, in their dtype."""
    dtype: type[np.floating] = np.float32 if layout.wide else np.float16
    begin, size = layout.codes_bytes, layout.scales_bytes

    def view(at: int) -> Scales:
        found = panels[..., at : at + size].view(dtype)
        return found.reshape(*panels.shape[:-1], layout.groups, LANES)

    return view(begin), view(begin + size) if layout.minima else None


def unpack_rows(panels: torch.Tensor, layout: Layout, ids: torch.Tensor) -> torch.Tensor:
    """Rows of what `pack` made, dequantized, fp32 [ids, k].

    In numpy, whose operations take a fifth of the time of torch's where a step has few ids.
    """
    panel, lanes = np.divmod(ids.numpy(), LANES)
    some = panels.numpy()[panel].reshape(len(panel), -1, layout.block_bytes)  # [ids, blocks, block_bytes]
    each = np.arange(len(panel))  # with it, `lanes` takes one lane of each row's panel
    codes = some[..., : layout.codes_bytes].reshape(*some.shape[:2], -1, LANES, STEP)[each, :, :, lanes]
    # [ids, blocks, steps, STEP]; a byte has two numbers of the same place in consecutive steps
    if layout.nibbles:
        steps = np.stack([codes & 15, codes >> 4], 3).reshape(*some.shape[:2], -1)
        numbers = steps.view(np.int8) - np.int8(0 if layout.minima else OFFSET)
    else:
        numbers = codes.reshape(*some.shape[:2], -1).view(np.int8)
    scales, minima = _scales_of(some, layout)
    of_groups = numbers.reshape(*some.shape[:2], layout.groups, layout.group).astype(np.float32)
    of_groups *= scales[each, :, :, lanes, None]
    if minima is not None:
        of_groups += minima[each, :, :, lanes, None]
    return torch.from_numpy(of_groups.reshape(len(panel), -1))
