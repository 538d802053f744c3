"""The micro-kernel of the int8 products: sums of 16-bit activations times 8-bit weights, in int32.

A *panel* holds 16 columns of a K x N matrix as K/2 rows of 16 pairs (k, k + 1), one byte a value; K is filled
up to an even number with zeros. AVX2 multiplies 16 pairs of int16 and adds each pair's products into int32 in
one instruction (pmaddwd), as fast as it multiplies bytes (pmaddubsw, pmaddwd) and without their saturation:
weights are widened on their way in, so activations may as well have the 16 bits. LLVM finds the instruction
(with VNNI: vpdpwssd) in the plain products below, and what there is on other processors.

Integer sums are exact, hence the same in any order: **a row's result does not depend on its batch**, as long
as nothing overflows, which `largest_activation` sees to. Addresses and strides are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

LANES = 16
PANEL_ROW_BYTES = 2 * LANES  # two k of 16 columns
LARGEST_WEIGHT = 127

_VECTOR = 8  # columns; two vectors a panel
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_V8 = ir.VectorType(_I32, _VECTOR)
_BYTES, _PAIRS = ir.VectorType(ir.IntType(8), 2 * _VECTOR), ir.VectorType(ir.IntType(16), 2 * _VECTOR)
_PRODUCTS = ir.VectorType(_I32, 2 * _VECTOR)


def largest_activation(k: int) -> int:
    """The largest magnitude, at most 32,767, with which k products can't overflow an int32 sum."""
    return min(32_767, (2**31 - 1) // (LARGEST_WEIGHT * max(k, 1)))


def _const(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _picks(indices: range) -> ir.Constant:
    return ir.Constant(ir.VectorType(_I32, len(indices)), list(indices))


def make_tile(rows: int, panels: int) -> Callable[..., None]:
    """A tile of `rows` x `panels` * 16: sums = X W, for at least one pair of k.

    Called as tile(x, x_stride, w, w_stride, pairs, sums, sums_stride): `w_stride` from panel to panel.
    rows * panels <= 6, so that the sums fit 16 vector registers.
    """

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        x, x_stride, w, w_stride, pairs, sums, sums_stride = args
        undefined = ir.Constant(_V8, ir.Undefined)
        broadcast = ir.Constant(ir.VectorType(_I32, _VECTOR), [0] * _VECTOR)
        cells = [(r, j) for r in range(rows) for j in range(panels * 2)]

        entry, loop, done = b.block, b.append_basic_block("k_loop"), b.append_basic_block("k_done")
        x_row = [b.add(x, b.mul(x_stride, _const(r))) for r in range(rows)]
        w_panel = [b.add(w, b.mul(w_stride, _const(p))) for p in range(panels)]
        b.branch(loop)

        b.position_at_end(loop)
        i = b.phi(_I64)
        i.add_incoming(_const(0), entry)
        totals = {cell: b.phi(_V8) for cell in cells}
        x_at, w_at = b.shl(i, _const(2)), b.shl(i, _const(5))
        columns = []
        for p in range(panels):
            for half in range(2):
                address = b.add(w_panel[p], b.add(w_at, _const(2 * _VECTOR * half)))
                packed = b.load(b.inttoptr(address, _BYTES.as_pointer()), align=1)
                columns.append(b.sext(b.sext(packed, _PAIRS), _PRODUCTS))
        raised = {}
        for r in range(rows):
            pair = b.load(b.inttoptr(b.add(x_row[r], x_at), _I32.as_pointer()), align=2)
            first = b.insert_element(undefined, pair, ir.Constant(_I32, 0))
            spread = b.sext(b.bitcast(b.shuffle_vector(first, undefined, broadcast), _PAIRS), _PRODUCTS)
            for j in range(panels * 2):
                products = b.mul(spread, columns[j])
                even = b.shuffle_vector(products, products, _picks(range(0, 2 * _VECTOR, 2)))
                odd = b.shuffle_vector(products, products, _picks(range(1, 2 * _VECTOR, 2)))
                raised[r, j] = b.add(totals[r, j], b.add(even, odd))
        following = b.add(i, _const(1))
        i.add_incoming(following, loop)
        for cell in cells:
            totals[cell].add_incoming(ir.Constant(_V8, [0] * _VECTOR), entry)
            totals[cell].add_incoming(raised[cell], loop)
        b.cbranch(b.icmp_signed("<", following, pairs), loop, done)

        b.position_at_end(done)
        for r, j in cells:
            address = b.add(b.add(sums, b.mul(sums_stride, _const(r))), _const(4 * _VECTOR * j))
            b.store(raised[r, j], b.inttoptr(address, _V8.as_pointer()), align=4)
        return context.get_dummy_value()

    def tile(  # type: ignore[no-untyped-def]
        typing_context, x, x_stride, w, w_stride, pairs, sums, sums_stride
    ):
        return types.void(*[types.int64] * 7), codegen

    made: Callable[..., None] = intrinsic(tile)
    return made


_tile_1x4, _tile_2x2, _tile_3x2 = make_tile(1, 4), make_tile(2, 2), make_tile(3, 2)
_tile_1, _tile_2, _tile_3 = make_tile(1, 1), make_tile(2, 1), make_tile(3, 1)
_tile_4, _tile_5, _tile_6 = make_tile(4, 1), make_tile(5, 1), make_tile(6, 1)


@njit(nogil=True)
def put_sums(
    x: int, x_stride: int, w: int, pairs: int, rows: int, panels: int, sums: NDArray[np.int32]
) -> None:
    """sums[:rows, : panels * 16] = X W for 1 to 6 rows; few rows take several panels at once."""
    at, stride, step, p = sums.ctypes.data, 4 * sums.shape[1], pairs * PANEL_ROW_BYTES, 0
    while p < panels:
        from_w, to = w + p * step, at + 4 * LANES * p
        if rows == 1 and p + 4 <= panels:
            _tile_1x4(x, x_stride, from_w, step, pairs, to, stride)
            p += 3
        elif rows == 2 and p + 2 <= panels:
            _tile_2x2(x, x_stride, from_w, step, pairs, to, stride)
            p += 1
        elif rows == 3 and p + 2 <= panels:
            _tile_3x2(x, x_stride, from_w, step, pairs, to, stride)
            p += 1
        elif rows == 6:
            _tile_6(x, x_stride, from_w, step, pairs, to, stride)
        elif rows == 5:
            _tile_5(x, x_stride, from_w, step, pairs, to, stride)
        elif rows == 4:
            _tile_4(x, x_stride, from_w, step, pairs, to, stride)
        elif rows == 3:
            _tile_3(x, x_stride, from_w, step, pairs, to, stride)
        elif rows == 2:
            _tile_2(x, x_stride, from_w, step, pairs, to, stride)
        else:
            _tile_1(x, x_stride, from_w, step, pairs, to, stride)
        p += 1
