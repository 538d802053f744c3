"""Linear layers over fp32 weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from executor_service.backends.torch_backend.cpu.gemm.low_rank import ShrinkRowsFp32
from executor_service.backends.torch_backend.cpu.gemm.products import MultiplyFp32, MultiplyGatedFp32
from executor_service.backends.torch_backend.cpu.layers.threaded_linear import (
    NO_ROW_CHANGES,
    Operand,
    RowChanges,
    ThreadedGated,
    ThreadedLinear,
)
from executor_service.backends.torch_backend.cpu.primitives.records import Address, Record
from executor_service.backends.torch_backend.cpu.primitives.registers import LANES
from executor_service.backends.torch_backend.cpu.threads.thread_pool import ThreadPool


class PackedLinear(ThreadedLinear):
    """x W^T + b, with W [n, k] given as parts that follow each other in n."""

    def __init__(self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None, pool: ThreadPool) -> None:
        weight = torch.cat([part.float() for part in parts])
        super().__init__(len(weight), pack_panels(weight), bias, pool)
        self._k = weight.shape[1]

    def calls(
        self, rows: int, x: Address, out: Address, add: bool, change: RowChanges = NO_ROW_CHANGES
    ) -> list[Record]:
        """What adapters read, the bias if any, and the product."""
        operand = Operand(rows, x, 4 * self._k, self._k)
        shrink = change.shrink(ShrinkRowsFp32, x, self._k)
        return [*shrink, *self._product(MultiplyFp32, operand, out, add, change)]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W, fp32 [ids, k]."""
        return self._panels[ids // LANES, :, ids % LANES]


class PackedGated(ThreadedGated):
    """silu(x G^T) * (x U^T)."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, pool: ThreadPool) -> None:
        super().__init__(len(gate), pack_panels(gate.float()), pack_panels(up.float()), pool)
        self._k = gate.shape[1]

    def calls(self, rows: int, x: Address, out: Address, change: RowChanges = NO_ROW_CHANGES) -> list[Record]:
        """What adapters read, and the product."""
        operand = Operand(rows, x, 4 * self._k, self._k)
        shrink = change.shrink(ShrinkRowsFp32, x, self._k)
        return [*shrink, self._product(MultiplyGatedFp32, operand, out, change)]


def pack_panels(weight: torch.Tensor, before: int = 0) -> torch.Tensor:
    """[n, k] to panels [ceil((before + n) / 16), k, 16], with zeros before and behind."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, before, -(before + n) % LANES))
    packed: torch.Tensor = padded.reshape(-1, LANES, k).transpose(1, 2).contiguous()
    return packed
