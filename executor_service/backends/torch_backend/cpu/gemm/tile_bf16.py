"""Tiles with bf16 panels, widened to fp32 when they are loaded; rows and sums are fp32."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from executor_service.backends.torch_backend.cpu.gemm.tile import make_product
from executor_service.backends.torch_backend.cpu.gemm.tile_fp32 import Fp32Arithmetic
from executor_service.backends.torch_backend.cpu.primitives.registers import LANES, VECTOR

_HALVES, _WORDS = ir.VectorType(ir.IntType(16), VECTOR), ir.VectorType(ir.IntType(32), VECTOR)


class _Bf16Arithmetic(Fp32Arithmetic):
    """The `Arithmetic` of rows in fp32 and panels in bf16, the upper half of an fp32's bits."""

    name = "bf16"
    step_bytes = 4
    panel_row_bytes = 2 * LANES

    def columns(self, b: Any, address: Any) -> Any:
        narrow = b.load(b.inttoptr(address, _HALVES.as_pointer()), align=2)
        wide = b.shl(b.zext(narrow, _WORDS), ir.Constant(_WORDS, [16] * VECTOR))
        return b.bitcast(wide, self.sums)


put_tile, add_tile = make_product(_Bf16Arithmetic(), False), make_product(_Bf16Arithmetic(), True)
"""out = X W and out += X W; a step along K is one float of X."""
