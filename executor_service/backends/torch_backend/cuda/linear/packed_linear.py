"""Linear layers whose weights stay in 4 bits on CUDA: from the files' numbers to `PackedWeight`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from executor_service.backends.torch_backend.cuda.linear.linears import CudaLinear, with_lines
from executor_service.backends.torch_backend.cuda.linear.packed import (
    BLOCK,
    INPUTS,
    TILED_ROWS,
    PackedWeight,
    packed_rows_launch,
    unpack_launch,
)
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers, Weight
from executor_service.backends.torch_backend.ops.low_rank import LinearChange

_LEAST_SPAN = 32
_CODES, _ZEROS = 16, 32  # how many there are
_LARGE = 1 << 30  # spans of a group that is a whole row


def is_supported(weight: ScaledNumbers) -> bool:
    """Whether there are products of these numbers: of 16 levels, in groups of a multiple of 32, or by row."""
    if weight.numbers.dtype != torch.int8 or not (
        weight.by_row or (weight.group_size or 1) % _LEAST_SPAN == 0
    ):
        return False
    groups = _in_groups(weight)
    zeros = _zeros(groups)
    fits = zeros.max() < _ZEROS and (groups.amax(-1) + zeros).max() < _CODES
    return bool(fits) and bool(weight.scales.isfinite().all())


def alike(parts: Sequence[Weight]) -> list[ScaledNumbers] | None:
    """The parts if they can be those of one layer here; None: some are tensors, or their groups differ."""
    scaled = [part for part in parts if isinstance(part, ScaledNumbers)]
    same = len({part.group_size for part in scaled}) == 1
    return scaled if len(scaled) == len(parts) and same else None


def pack(parts: Sequence[ScaledNumbers], device: torch.device) -> PackedWeight:
    """The parts, which follow each other in n and are alike, on a device."""
    k, whole = parts[0].shape[1], parts[0].by_row
    size = parts[0].group_size or k
    span = INPUTS if whole else min(INPUTS, size & -size)
    columns, rows = k + -k % INPUTS, sum(part.shape[0] for part in parts)
    blocks = -(-rows // int(BLOCK))
    filled = blocks * int(BLOCK)
    codes = torch.zeros(filled, columns, dtype=torch.uint8)
    words = torch.zeros(filled, parts[0].scales.shape[1] if whole else -(-columns // size), dtype=torch.int32)
    least = any(part.minima is not None for part in parts)
    minima = torch.zeros(words.shape) if least else None
    first = 0
    for part in parts:
        some, count = slice(first, first + part.shape[0]), part.scales.shape[1]
        zeros = _zeros(_in_groups(part))
        codes[some, :k] = (part.numbers + zeros.to(torch.int8)[:, part.groups]).view(torch.uint8)
        words[some, :count] = _rounded(part.scales) | zeros.to(torch.int32)
        if minima is not None and part.minima is not None:
            minima[some, :count] = part.minima
        first += len(part.numbers)
    halves = codes.view(blocks, int(BLOCK), columns // span, 2, span // 2)
    packed = (halves[..., 0, :] | halves[..., 1, :] << 4).transpose(1, 2).contiguous()

    def by_block(values: torch.Tensor) -> torch.Tensor:
        return values.view(blocks, int(BLOCK), -1).transpose(1, 2).contiguous().to(device)

    return PackedWeight(
        n=rows,
        k=k,
        span=span,
        spans=_LARGE if whole else size // span,
        codes=packed.to(device),
        words=by_block(words),
        minima=None if minima is None else by_block(minima),
    )


def _in_groups(weight: ScaledNumbers) -> torch.Tensor:
    """The numbers [n, groups, numbers of a group]; the last group is filled up with its last number."""
    k = weight.shape[1]
    size = weight.group_size or k
    index = torch.arange(-(-k // size) * size).clamp(max=k - 1)
    return weight.numbers[:, index].view(len(weight.numbers), -1, size)


def _zeros(groups: torch.Tensor) -> torch.Tensor:
    """The zero points [n, groups] with which no code is below 0."""
    return (-groups.amin(-1).to(torch.int16)).clamp(min=0)


def _rounded(scales: torch.Tensor) -> torch.Tensor:
    """The bits of scales in fp32, int32, to 18 bits after the point: exact for those of 16 bits."""
    bits = scales.float().contiguous().view(torch.int32)
    return (bits + _ZEROS // 2) & ~(_ZEROS - 1)


class PackedLinear:
    """x W^T + b in bf16, with W in 4 bits given as parts that follow each other in n and are alike."""

    gated_rows = TILED_ROWS
    """Of a product that has the gate in it, at most."""

    def __init__(
        self,
        parts: Sequence[ScaledNumbers],
        bias: torch.Tensor | None,
        arrivals: torch.Tensor,
    ) -> None:
        """`arrivals`: of `skinny_gemm.new_arrivals`, on the layer's device."""
        self.packed, self._arrivals = pack(parts, arrivals.device), arrivals
        self._bias = None if bias is None else bias.to(arrivals.device, torch.bfloat16)

    def __call__(
        self, x: torch.Tensor, add_to: torch.Tensor | None = None, change: LinearChange | None = None
    ) -> torch.Tensor:
        """[rows, k] to [rows, n]; with `add_to` [rows, n] the result is added to it, in place."""
        if len(x) > TILED_ROWS:
            return CudaLinear(self.unpacked(), self._bias)(x, add_to, change)
        out = x.new_empty(len(x), self.packed.n) if add_to is None else add_to
        self._launch(x, out, add=add_to is not None)
        if change is not None:
            change.add(x, out)
        return out

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """The gated product of up to `gated_rows` rows, where half of the outputs are gates."""
        out = x.new_empty(len(x), self.packed.n // 2)
        self._launch(x, out, activation=activation)
        return out

    def _launch(
        self, x: torch.Tensor, out: torch.Tensor, *, add: bool = False, activation: Activation | None = None
    ) -> None:
        packed_rows_launch(
            with_lines(x), self.packed, self._bias, out, self._arrivals, add=add, activation=activation
        ).run()

    def unpacked(self) -> torch.Tensor:
        """A copy of W in bf16, [n, k]."""
        out = torch.empty(self.packed.n, self.packed.k, dtype=torch.bfloat16, device=self.packed.codes.device)
        unpack_launch(self.packed, out).run()
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W, dequantized, [ids, k]."""
        return self.unpacked()[ids]

    def bytes(self) -> int:
        """Bytes of the weights, scales and minima."""
        return self.packed.nbytes
