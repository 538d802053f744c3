"""Tiles with int8 panels, converted to fp32 when they are loaded; rows and sums are fp32.

Panels have no scales: `attention.scales` multiplies rows or results by them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from executor_service.backends.torch_backend.cpu.gemm.tile import make_product
from executor_service.backends.torch_backend.cpu.gemm.tile_fp32 import Fp32Arithmetic
from executor_service.backends.torch_backend.cpu.primitives.registers import LANES, VECTOR

_BYTES, _INTS = (ir.VectorType(ir.IntType(bits), VECTOR) for bits in (8, 32))


class _ByteArithmetic(Fp32Arithmetic):
    """The `Arithmetic` of rows in fp32 and panels in int8."""

    name = "bytes"
    step_bytes = 4
    panel_row_bytes = LANES

    def columns(self, b: Any, address: Any) -> Any:
        narrow = b.load(b.inttoptr(address, _BYTES.as_pointer()), align=1)
        return b.sitofp(b.sext(narrow, _INTS), self.sums)


put_tile, add_tile = make_product(_ByteArithmetic(), False), make_product(_ByteArithmetic(), True)
"""out = X W and out += X W; a step along K is one float of X."""
