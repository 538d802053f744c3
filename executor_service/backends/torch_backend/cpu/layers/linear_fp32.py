"""Linear layers that compute in fp32, over weights that stay in their dtype: fp32, bf16 or fp16.

Numbers of 16 bits are widened while they are multiplied, so results are those of a copy in fp32, to the last
bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from executor_service.backends.torch_backend.cpu.gemm.low_rank import ShrinkRowsFp32
from executor_service.backends.torch_backend.cpu.gemm.products import (
    Multiply,
    MultiplyBf16,
    MultiplyFp16,
    MultiplyFp32,
    MultiplyGated,
    MultiplyGatedBf16,
    MultiplyGatedFp16,
    MultiplyGatedFp32,
)
from executor_service.backends.torch_backend.cpu.layers.threaded_linear import (
    NO_ROW_CHANGES,
    Operand,
    RowChanges,
    ThreadedGated,
    ThreadedLinear,
)
from executor_service.backends.torch_backend.cpu.primitives.records import Address, Record
from executor_service.backends.torch_backend.cpu.primitives.registers import CONVERTS_FP16, LANES
from executor_service.backends.torch_backend.cpu.threads.thread_pool import ThreadPool
from executor_service.backends.torch_backend.files.architecture.activation import Activation

_MULTIPLY: Mapping[torch.dtype, type[Multiply]] = {
    torch.float32: MultiplyFp32,
    torch.bfloat16: MultiplyBf16,
    torch.float16: MultiplyFp16,
}
_MULTIPLY_GATED: Mapping[torch.dtype, type[MultiplyGated]] = {
    torch.float32: MultiplyGatedFp32,
    torch.bfloat16: MultiplyGatedBf16,
    torch.float16: MultiplyGatedFp16,
}
_KEPT = set(_MULTIPLY) if CONVERTS_FP16 else {torch.float32, torch.bfloat16}


class LinearFp32(ThreadedLinear):
    """x W^T + b of rows in fp32, whatever the numbers of W are."""

    _k: int
    _kind: type[Multiply]

    def calls(
        self, rows: int, x: Address, out: Address, add: bool, change: RowChanges = NO_ROW_CHANGES
    ) -> list[Record]:
        """What adapters read, the bias if any, and the product."""
        operand = Operand(rows, x, 4 * self._k, self._k)
        shrink = change.shrink(ShrinkRowsFp32, x, self._k)
        return [*shrink, *self._product(self._kind, operand, out, add, change)]


class GatedFp32(ThreadedGated):
    """activation(x G^T) * (x U^T) of rows in fp32."""

    _k: int
    _kind: type[MultiplyGated]

    def calls(self, rows: int, x: Address, out: Address, change: RowChanges = NO_ROW_CHANGES) -> list[Record]:
        """What adapters read, and the product."""
        operand = Operand(rows, x, 4 * self._k, self._k)
        shrink = change.shrink(ShrinkRowsFp32, x, self._k)
        return [*shrink, self._product(self._kind, operand, out, change)]


class PackedLinear(LinearFp32):
    """x W^T + b, with W [n, k] given as parts that follow each other in n."""

    def __init__(self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None, pool: ThreadPool) -> None:
        weight = torch.cat(_of_one_dtype(parts))
        super().__init__(len(weight), pack_panels(weight), bias, pool)
        self._k, self._kind = weight.shape[1], _MULTIPLY[weight.dtype]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W, fp32 [ids, k]."""
        return self._panels[ids // LANES, :, ids % LANES].float()


class PackedGated(GatedFp32):
    """activation(x G^T) * (x U^T)."""

    def __init__(
        self, gate: torch.Tensor, up: torch.Tensor, activation: Activation, pool: ThreadPool
    ) -> None:
        gate, up = _of_one_dtype((gate, up))
        super().__init__(len(gate), pack_panels(gate), pack_panels(up), activation, pool)
        self._k, self._kind = gate.shape[1], _MULTIPLY_GATED[gate.dtype]


def _of_one_dtype(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts in their dtype if it is the same and there are products of it, else in fp32."""
    dtypes = {part.dtype for part in parts}
    return list(parts) if len(dtypes) == 1 and dtypes <= _KEPT else [part.float() for part in parts]


def pack_panels(weight: torch.Tensor, before: int = 0) -> torch.Tensor:
    """[n, k] to panels [ceil((before + n) / 16), k, 16], with zeros before and after."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, before, -(before + n) % LANES))
    packed: torch.Tensor = padded.reshape(-1, LANES, k).transpose(1, 2).contiguous()
    return packed
