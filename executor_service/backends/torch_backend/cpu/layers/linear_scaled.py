"""Linear layers that compute in fp32, over weights of 8 bits and their scales, as checkpoints have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from executor_service.backends.torch_backend.cpu.gemm.products import (
    Multiply,
    MultiplyGated,
    MultiplyGatedScaledFp8,
    MultiplyGatedScaledInt8,
    MultiplyScaledFp8,
    MultiplyScaledInt8,
)
from executor_service.backends.torch_backend.cpu.gemm.tile_scaled import (
    FP8_FACTOR,
    HEADER_BYTES,
    ROW_BYTES,
    SCALES_BYTES,
)
from executor_service.backends.torch_backend.cpu.layers.linear_fp32 import GatedFp32, LinearFp32
from executor_service.backends.torch_backend.cpu.primitives.registers import CONVERTS_FP16, LANES
from executor_service.backends.torch_backend.cpu.threads.thread_pool import ThreadPool
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers, Weight

_MULTIPLY: Mapping[torch.dtype, type[Multiply]] = {
    torch.int8: MultiplyScaledInt8,
    torch.float8_e4m3fn: MultiplyScaledFp8,
}
_MULTIPLY_GATED: Mapping[torch.dtype, type[MultiplyGated]] = {
    torch.int8: MultiplyGatedScaledInt8,
    torch.float8_e4m3fn: MultiplyGatedScaledFp8,
}
_FACTORS = {torch.int8: 1.0, torch.float8_e4m3fn: FP8_FACTOR}
_DTYPES = {torch.int8, torch.float8_e4m3fn} if CONVERTS_FP16 else {torch.int8}


def is_supported(weight: ScaledNumbers) -> bool:
    """Whether there are products of these numbers: of 8 bits, in groups that follow each other."""
    return weight.numbers.dtype in _DTYPES and weight.group_size is not None


def alike(parts: Sequence[Weight]) -> list[ScaledNumbers] | None:
    """The parts if they can be those of one layer here; None: some are tensors, or they differ."""
    scaled = [part for part in parts if isinstance(part, ScaledNumbers)]
    kinds = {(part.numbers.dtype, part.group_size) for part in scaled}
    return scaled if len(scaled) == len(parts) and len(kinds) == 1 else None


class ScaledLinear(LinearFp32):
    """x W^T + b, with W [n, k] given as parts that follow each other in n and are alike."""

    def __init__(self, parts: Sequence[ScaledNumbers], bias: torch.Tensor | None, pool: ThreadPool) -> None:
        weight = joined(parts)
        super().__init__(weight.shape[0], pack(weight), bias, pool)
        self._k, self._group = weight.shape[1], weight.group_size or weight.shape[1]
        self._dtype, self._kind = weight.numbers.dtype, _MULTIPLY[weight.numbers.dtype]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W, dequantized, fp32 [ids, k]."""
        out = torch.empty(len(ids), self._k)
        panels, lanes = self._panels[ids // LANES], ids % LANES
        at = HEADER_BYTES
        for first in range(0, self._k, self._group):
            columns = slice(first, min(first + self._group, self._k))
            numbers, scales = _views(panels, at, columns.stop - first)
            some = torch.arange(len(ids))
            factor = scales[some, lanes, None] / _FACTORS[self._dtype]
            out[:, columns] = numbers.view(self._dtype)[some, :, lanes].float() * factor
            at += (columns.stop - first) * ROW_BYTES + SCALES_BYTES
        return out


class ScaledGated(GatedFp32):
    """activation(x G^T) * (x U^T), with G and U alike."""

    def __init__(
        self, gate: ScaledNumbers, up: ScaledNumbers, activation: Activation, pool: ThreadPool
    ) -> None:
        super().__init__(gate.shape[0], pack(gate), pack(up), activation, pool)
        self._k, self._kind = gate.shape[1], _MULTIPLY_GATED[gate.numbers.dtype]


def joined(parts: Sequence[ScaledNumbers]) -> ScaledNumbers:
    """Parts that are alike, one after the other."""
    if len(parts) == 1:
        return parts[0]
    numbers = torch.cat([part.numbers.view(torch.int8) for part in parts]).view(parts[0].numbers.dtype)
    return ScaledNumbers(numbers, torch.cat([part.scales for part in parts]), parts[0].groups)


def pack(weight: ScaledNumbers) -> torch.Tensor:
    """W [n, k] to panels, bytes [ceil(n / 16), ...], as `gemm.tile_scaled` describes them.

    The last panel is padded with zeros.
    """
    n, k = weight.shape
    size = weight.group_size or k
    count, more = -(-k // size), -n % LANES
    panels = torch.zeros(
        -(-n // LANES), HEADER_BYTES + k * ROW_BYTES + count * SCALES_BYTES, dtype=torch.uint8
    )
    panels[:, :8].view(torch.int64)[:] = size
    stored = torch.nn.functional.pad(weight.numbers.view(torch.int8), (0, 0, 0, more)).view(-1, LANES, k)
    factors = torch.nn.functional.pad(weight.scales, (0, 0, 0, more)) * _FACTORS[weight.numbers.dtype]
    at = HEADER_BYTES
    for group in range(count):
        columns = slice(group * size, min((group + 1) * size, k))
        numbers, scales = _views(panels, at, columns.stop - columns.start)
        numbers.copy_(stored[:, :, columns].transpose(1, 2))
        scales.copy_(factors[:, group].view(-1, LANES))
        at += (columns.stop - columns.start) * ROW_BYTES + SCALES_BYTES
    return panels


def _views(panels: torch.Tensor, at: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The group that begins at a byte: numbers, int8 [panels, steps, 16], and scales, fp32 [panels, 16]."""
    end = at + steps * ROW_BYTES
    numbers, scales = panels[:, at:end], panels[:, end : end + SCALES_BYTES]
    return numbers.view(torch.int8).view(-1, steps, LANES), scales.view(torch.float32)
