"""Tiles with fp16 panels, converted to fp32 when they are loaded; rows and sums are fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from executor_service.backends.torch_backend.cpu.gemm.tile import make_product
from executor_service.backends.torch_backend.cpu.gemm.tile_fp32 import Fp32Arithmetic
from executor_service.backends.torch_backend.cpu.primitives.registers import LANES, VECTOR

_F16 = ir.HalfType()


class _Fp16Arithmetic(Fp32Arithmetic):
    """The `Arithmetic` of rows in fp32 and panels in fp16."""

    name = "fp16"
    step_bytes = 4
    panel_row_bytes = 2 * LANES

    def columns(self, b: Any, address: Any) -> Any:
        narrow = b.load(b.inttoptr(address, ir.VectorType(_F16, VECTOR).as_pointer()), align=2)
        return b.fpext(narrow, self.sums)


put_tile, add_tile = make_product(_Fp16Arithmetic(), False), make_product(_Fp16Arithmetic(), True)
"""out = X W and out += X W; a step along K is one float of X."""


def _round(_typing_context, address, value):  # type: ignore[no-untyped-def]
    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        b.store(b.fptrunc(args[1], _F16), b.inttoptr(args[0], _F16.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


store = cast(Callable[[int, np.float32], None], intrinsic(_round))
"""Round an fp32 to the nearest fp16, ties to even, at an address; infinite from 65,520 on."""
