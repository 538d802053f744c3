"""Linear layers over int8 weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from executor_service.backends.torch_backend.cpu.gemm.low_rank import ShrinkRowsFp16
from executor_service.backends.torch_backend.cpu.gemm.products import MultiplyGatedInt8, MultiplyInt8
from executor_service.backends.torch_backend.cpu.gemm.quantize import QuantizeRows
from executor_service.backends.torch_backend.cpu.gemm.tile_int8 import (
    LARGEST_WEIGHT,
    PANEL_ROW_BYTES,
    PANEL_SCALE_BYTES,
    ROW_SCALE_BYTES,
    largest_activation,
)
from executor_service.backends.torch_backend.cpu.layers.threaded_linear import (
    NO_ROW_CHANGES,
    Operand,
    RowChanges,
    Scratch,
    ThreadedGated,
    ThreadedLinear,
)
from executor_service.backends.torch_backend.cpu.primitives.records import Address, Record
from executor_service.backends.torch_backend.cpu.primitives.registers import LANES
from executor_service.backends.torch_backend.cpu.threads.thread_pool import ThreadPool
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers, Weight

_PACKED_AT_ONCE = 256 * LANES  # rows of W, so that packing takes little memory beside the result


class _RowFormat:
    """The layout of quantized rows of k numbers, and their memory."""

    def __init__(self, k: int, largest_weight: int, scratch: Scratch) -> None:
        self.k, self._pairs, self._scratch = k, -(-k // 2), scratch
        self._largest = largest_activation(k, largest_weight)
        self._stride = ROW_SCALE_BYTES + 4 * self._pairs

    def quantized(self, rows: int, x: Address) -> tuple[Record, Operand]:
        """The call that quantizes rows, and its result as the operand of a product."""
        out = self._scratch.address(rows * self._stride)
        call = QuantizeRows(rows, x, out, self._stride, self.k, self._largest)
        return call, Operand(rows, Address(out + ROW_SCALE_BYTES), self._stride, self._pairs)


class Int8Linear(ThreadedLinear):
    """x W^T + b, with W [n, k] given as parts that are concatenated along n, rounded to int8."""

    def __init__(
        self, parts: Sequence[Weight], bias: torch.Tensor | None, pool: ThreadPool, scratch: Scratch
    ) -> None:
        """Parts that are int8 with a scale for each row keep both."""
        weight = _joined(parts)
        super().__init__(weight.shape[0], pack(weight), bias, pool)
        self._x = _RowFormat(weight.shape[1], _largest(weight), scratch)

    def calls(
        self, rows: int, x: Address, out: Address, add: bool, change: RowChanges = NO_ROW_CHANGES
    ) -> list[Record]:
        """What adapters read, quantization of the rows, the bias if any, and the product."""
        shrink = change.shrink(ShrinkRowsFp16, x, self._x.k)
        quantize, operand = self._x.quantized(rows, x)
        return [*shrink, quantize, *self._product(MultiplyInt8, operand, out, add, change)]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the rounded W, dequantized, fp32 [ids, k]."""
        weights, scales = unpack(self._panels)
        rounded = weights[ids // LANES, :, ids % LANES].flatten(1)[:, : self._x.k]
        return rounded.float() * scales[ids // LANES, ids % LANES, None]


class Int8Gated(ThreadedGated):
    """activation(x G^T) * (x U^T), with G and U rounded to int8."""

    def __init__(
        self, gate: Weight, up: Weight, activation: Activation, pool: ThreadPool, scratch: Scratch
    ) -> None:
        super().__init__(gate.shape[0], pack(gate), pack(up), activation, pool)
        self._x = _RowFormat(gate.shape[1], max(_largest(gate), _largest(up)), scratch)

    def calls(self, rows: int, x: Address, out: Address, change: RowChanges = NO_ROW_CHANGES) -> list[Record]:
        """What adapters read, quantization of the rows, and the product."""
        shrink = change.shrink(ShrinkRowsFp16, x, self._x.k)
        quantize, operand = self._x.quantized(rows, x)
        return [*shrink, quantize, self._product(MultiplyGatedInt8, operand, out, change)]


def _joined(parts: Sequence[Weight]) -> Weight:
    """The parts, one after the other; those that are tensors are rounded where others are not."""
    if len(parts) == 1:
        return parts[0]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(tensors) == len(parts):
        return torch.cat(tensors)
    rounded = [part if isinstance(part, ScaledNumbers) else round_rows(part) for part in parts]
    scales = torch.cat([part.scales for part in rounded])
    return ScaledNumbers(torch.cat([part.numbers for part in rounded]), scales, rounded[0].groups)


def _largest(weight: Weight) -> int:
    """The largest magnitude that an int8 of this weight can have."""
    return LARGEST_WEIGHT if isinstance(weight, torch.Tensor) else -torch.iinfo(torch.int8).min


def round_rows(weight: torch.Tensor) -> ScaledNumbers:
    """W [n, k] in int8. The scale of a row is its largest magnitude / 127, or NaN if it is not finite."""
    part = weight.float()
    largest = part.abs().amax(1)
    scale = torch.where(largest.isfinite(), largest, torch.nan) / LARGEST_WEIGHT
    rounded = (part / scale[:, None]).round_().nan_to_num_(0.0, 0.0, 0.0)
    rounded = rounded.clamp_(-LARGEST_WEIGHT, LARGEST_WEIGHT).to(torch.int8)  # scales may be denormal
    return ScaledNumbers(rounded, scale[:, None], torch.zeros(weight.shape[1], dtype=torch.int64))


def pack(weight: Weight) -> torch.Tensor:
    """W [n, k] to panels, bytes [ceil(n / 16), ...]: int8 [ceil(k / 2), 16, 2], then 16 scales in fp32.

    The last panel is padded with zeros. A tensor is rounded; numbers and scales are kept.
    """
    n, k = weight.shape
    pairs = -(-k // 2)
    panels = torch.empty(-(-n // LANES), pairs * PANEL_ROW_BYTES + PANEL_SCALE_BYTES, dtype=torch.uint8)
    weights, scales = unpack(panels)
    for first in range(0, n, _PACKED_AT_ONCE):
        rows = slice(first, first + _PACKED_AT_ONCE)
        part = weight.part(rows) if isinstance(weight, ScaledNumbers) else round_rows(weight[rows])
        more = -part.shape[0] % LANES
        numbers = torch.nn.functional.pad(part.numbers, (0, k % 2, 0, more))
        some = slice(first // LANES, first // LANES + len(numbers) // LANES)
        weights[some] = numbers.view(-1, LANES, pairs, 2).transpose(1, 2)
        scales[some] = torch.nn.functional.pad(part.scales, (0, 0, 0, more)).view(-1, LANES)
    return panels


def unpack(panels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of what `pack` made: int8 [panels, ceil(k / 2), 16, 2] and scales fp32 [panels, 16]."""
    weights, scales = panels[:, :-PANEL_SCALE_BYTES], panels[:, -PANEL_SCALE_BYTES:]
    pairs = weights.shape[1] // PANEL_ROW_BYTES
    return weights.view(torch.int8).view(-1, pairs, LANES, 2), scales.view(torch.float32)
