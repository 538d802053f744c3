"""Tiles over weights of 8 bits, int8 or fp8 (e4m3), with fp32 scales; rows and sums are fp32.

A panel begins with a header, the size of its groups along K as an int64. Of each group it has the rows of K,
a byte for each of the 16 columns, then 16 scales. The last group may be smaller. A tile goes through one
group: its sums are scaled and added to the result, so that no number is rounded to a dequantized one.

e4m3 is widened by way of fp16, which has the same bits at other places and 256 times the bias: scales of fp8
panels include that factor (`FP8_FACTOR`).
"""

from __future__ import annotations

from typing import Any, Protocol, cast

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit

from executor_service.backends.torch_backend.cpu.gemm.tile import Product, make_product
from executor_service.backends.torch_backend.cpu.gemm.tile_fp32 import Fp32Arithmetic
from executor_service.backends.torch_backend.cpu.primitives.memory import longs
from executor_service.backends.torch_backend.cpu.primitives.registers import LANES, VECTOR

HEADER_BYTES = 64
ROW_BYTES = LANES
SCALES_BYTES = 4 * LANES  # after the rows of a group
FP8_FACTOR = 256.0

_BYTES = ir.VectorType(ir.IntType(8), VECTOR)
_HALVES, _F16 = ir.VectorType(ir.IntType(16), VECTOR), ir.VectorType(ir.HalfType(), VECTOR)
_WORDS = ir.VectorType(ir.IntType(32), VECTOR)


class _ScaledArithmetic(Fp32Arithmetic):
    """The `Arithmetic` of rows in fp32 and panels of bytes."""

    step_bytes = 4
    panel_row_bytes = ROW_BYTES

    def finished(self, b: Any, sums: Any, row: Any, after_columns: Any) -> Any:
        return b.fmul(sums, b.load(b.inttoptr(after_columns, self.sums.as_pointer()), align=4))


class _ScaledInt8Arithmetic(_ScaledArithmetic):
    name = "scaled_int8"

    def columns(self, b: Any, address: Any) -> Any:
        return b.sitofp(b.sext(b.load(b.inttoptr(address, _BYTES.as_pointer()), align=1), _WORDS), self.sums)


class _Fp8Arithmetic(_ScaledArithmetic):
    name = "scaled_fp8"

    def columns(self, b: Any, address: Any) -> Any:
        wide = b.sext(b.load(b.inttoptr(address, _BYTES.as_pointer()), align=1), _HALVES)
        moved = b.shl(wide, ir.Constant(_HALVES, [7] * VECTOR))
        bits = b.and_(moved, ir.Constant(_HALVES, [0xBFFF] * VECTOR))  # all but a second sign
        return b.fpext(b.bitcast(bits, _F16), self.sums)


class GroupedTiles(Protocol):
    """The products of one arithmetic."""

    put_tile: Product
    add_tile: Product


class _Grouped:
    """Implements `GroupedTiles`, group by group."""

    def __init__(self, arithmetic: _ScaledArithmetic) -> None:
        put, add = make_product(arithmetic, False), make_product(arithmetic, True)
        self.put_tile, self.add_tile = _all_groups(put, add), _all_groups(add, add)


def _all_groups(first: Product, others: Product) -> Product:
    """A `Product` over whole panels, from those over the first group and over the others."""

    @njit(nogil=True, fastmath=False)
    def product(
        x: int,
        x_stride: int,
        w: int,
        w_stride: int,
        panels: int,
        k: int,
        out: int,
        out_stride: int,
        rows: int,
    ) -> None:
        size, from_w = longs(w, 1)[0], w + HEADER_BYTES
        first(x, x_stride, from_w, w_stride, panels, min(size, k), out, out_stride, rows)
        for begin in range(size, k, size):
            from_w += size * ROW_BYTES + SCALES_BYTES
            steps = min(size, k - begin)
            others(x + 4 * begin, x_stride, from_w, w_stride, panels, steps, out, out_stride, rows)

    return cast(Product, product)


INT8: GroupedTiles = _Grouped(_ScaledInt8Arithmetic())
FP8: GroupedTiles = _Grouped(_Fp8Arithmetic())
