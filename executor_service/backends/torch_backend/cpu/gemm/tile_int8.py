"""Tiles of the int8 products: sums of 16-bit activations times 8-bit weights, in int32, then scaled.

A panel's step is two rows of K: 16 pairs (k, k + 1), one byte per value; K is padded with zeros to an even
number. AVX2 multiplies 16 pairs of int16 and adds each pair's products into int32 in one instruction
(pmaddwd). That is as fast as its products of bytes (pmaddubsw, pmaddwd), and does not saturate as they do.
Weights are widened when they are loaded, so activations can have 16 bits at no cost. LLVM makes this
instruction (with VNNI vpdpwssd, which also accumulates) of the plain products below, and on other processors
what they have.

A row of X has a scale in fp32 before it, a panel has 16 after it. A result is the sum times both scales.

Integer sums are exact, hence the same in any order: **a row's result does not depend on its batch**. They do
not overflow, because `largest_activation` limits the activations.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from executor_service.backends.torch_backend.cpu.gemm.tile import make_product, spread
from executor_service.backends.torch_backend.cpu.primitives.registers import LANES, VECTOR

PANEL_ROW_BYTES = 2 * LANES  # two k of 16 columns
PANEL_SCALE_BYTES = 4 * LANES  # after a panel's rows
ROW_SCALE_BYTES = 4  # before a row of X
LARGEST_WEIGHT = 127

_I32, _F32 = ir.IntType(32), ir.FloatType()
_SCALES = ir.VectorType(_F32, VECTOR)
_BYTES, _PAIRS = ir.VectorType(ir.IntType(8), 2 * VECTOR), ir.VectorType(ir.IntType(16), 2 * VECTOR)
_PRODUCTS = ir.VectorType(_I32, 2 * VECTOR)


def largest_activation(k: int, largest_weight: int = LARGEST_WEIGHT) -> int:
    """The largest magnitude, at most 32,767, with which k products can't overflow an int32 sum."""
    return min(32_767, (2**31 - 1) // (largest_weight * max(k, 1)))


def _every_other(first: int) -> ir.Constant:
    indices = list(range(first, 2 * VECTOR, 2))
    return ir.Constant(ir.VectorType(_I32, len(indices)), indices)


class _Int8Arithmetic:
    """The `Arithmetic` of rows in int16 and panels in int8."""

    name = "int8"
    step_bytes = 4
    panel_row_bytes = PANEL_ROW_BYTES
    sums = ir.VectorType(_I32, VECTOR)

    def columns(self, b: Any, address: Any) -> Any:
        return b.sext(b.sext(b.load(b.inttoptr(address, _BYTES.as_pointer()), align=1), _PAIRS), _PRODUCTS)

    def spread(self, b: Any, address: Any) -> Any:
        pair = b.load(b.inttoptr(address, _I32.as_pointer()), align=2)
        return b.sext(b.bitcast(spread(b, pair), _PAIRS), _PRODUCTS)

    def added(self, b: Any, sums: Any, values: Any, columns: Any) -> Any:
        products = b.mul(values, columns)
        even, odd = (b.shuffle_vector(products, products, _every_other(first)) for first in (0, 1))
        return b.add(sums, b.add(even, odd))

    def finished(self, b: Any, sums: Any, row: Any, after_columns: Any) -> Any:
        before = b.sub(row, ir.Constant(row.type, ROW_SCALE_BYTES))
        scale = b.load(b.inttoptr(before, _F32.as_pointer()), align=4)
        scales = b.load(b.inttoptr(after_columns, _SCALES.as_pointer()), align=4)
        return b.fmul(b.sitofp(sums, _SCALES), b.fmul(spread(b, scale), scales))


put_tile, add_tile = make_product(_Int8Arithmetic(), False), make_product(_Int8Arithmetic(), True)
"""out = X W and out += X W; a step along K is a pair of int16 of X, which begins after the first scale."""
