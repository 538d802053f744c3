"""Tiles in fp32: chains of fused multiply-adds. A panel's step is 16 floats."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit

from executor_service.backends.torch_backend.cpu.gemm.tile import make_product, spread
from executor_service.backends.torch_backend.cpu.primitives.memory import floats, insert_function
from executor_service.backends.torch_backend.cpu.primitives.registers import LANES, VECTOR

_F32 = ir.FloatType()


class Fp32Arithmetic:
    """The `Arithmetic` of rows and panels in fp32."""

    name = "fp32"
    step_bytes = 4
    panel_row_bytes = 4 * LANES
    sums = ir.VectorType(_F32, VECTOR)

    def columns(self, b: Any, address: Any) -> Any:
        return b.load(b.inttoptr(address, self.sums.as_pointer()), align=4)

    def spread(self, b: Any, address: Any) -> Any:
        return spread(b, b.load(b.inttoptr(address, _F32.as_pointer()), align=4))

    def added(self, b: Any, sums: Any, values: Any, columns: Any) -> Any:
        kind = ir.FunctionType(self.sums, [self.sums] * 3)
        return b.call(insert_function(b.module, kind, f"llvm.fmuladd.v{VECTOR}f32"), [values, columns, sums])

    def finished(self, b: Any, sums: Any, row: Any, after_columns: Any) -> Any:
        return sums


put_tile, add_tile = make_product(Fp32Arithmetic(), False), make_product(Fp32Arithmetic(), True)
"""out = X W and out += X W; a step along K is one float of X."""


@njit(nogil=True)
def store(address: int, value: np.float32) -> None:
    """Put an fp32 at an address."""
    floats(address, 1)[0] = value
