"""The micro-kernel of every CPU matrix product: `tile`, a few rows of X times one panel of 16 columns.

A *panel* holds 16 columns of a K x N matrix as K x 16 contiguous floats. A tile keeps its results in
vector registers while it walks K once, so each result is one chain of fused multiply-adds in the order of
K, whatever the number of rows: **a row's result does not depend on its batch**. Written as LLVM IR, because
no loop in Python keeps 12 accumulators in registers. The scheme is the register blocking of BLIS
(Van Zee, van de Geijn 2015). All addresses and strides are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from executor_service.backends.torch_backend.cpu.atomic import insert_function

LANES = 16
PANEL_ROW_BYTES = 4 * LANES
_VECTOR = 8  # floats; two vectors a panel

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_V8 = ir.VectorType(_F32, _VECTOR)


def _const(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def make_tile(rows: int, panels: int, add: bool) -> Callable[..., None]:
    """A tile of `rows` x `panels` * 16: out = X W, or out += X W with `add`.

    Called as tile(x, x_stride, w, w_stride, k, out, out_stride): `w_stride` from panel to panel.
    rows * panels <= 6, so that the accumulators fit 16 vector registers.
    """

    def codegen(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        x, x_stride, w, w_stride, k, out, out_stride = args
        fma = insert_function(b.module, ir.FunctionType(_V8, [_V8, _V8, _V8]), "llvm.fmuladd.v8f32")
        zero = ir.Constant(_V8, [0.0] * _VECTOR)
        undefined = ir.Constant(_V8, ir.Undefined)
        broadcast = ir.Constant(ir.VectorType(_I32, _VECTOR), [0] * _VECTOR)
        cells = [(r, j) for r in range(rows) for j in range(panels * 2)]

        entry, loop, done = b.block, b.append_basic_block("k_loop"), b.append_basic_block("k_done")
        x_row = [b.add(x, b.mul(x_stride, _const(r))) for r in range(rows)]
        w_panel = [b.add(w, b.mul(w_stride, _const(p))) for p in range(panels)]
        b.cbranch(b.icmp_signed(">", k, _const(0)), loop, done)

        b.position_at_end(loop)
        i = b.phi(_I64)
        i.add_incoming(_const(0), entry)
        sums = {cell: b.phi(_V8) for cell in cells}
        x_at, w_at = b.shl(i, _const(2)), b.shl(i, _const(6))
        columns = [
            b.load(b.inttoptr(b.add(w_panel[p], b.add(w_at, _const(32 * half))), _V8.as_pointer()), align=4)
            for p in range(panels)
            for half in range(2)
        ]
        raised = {}
        for r in range(rows):
            value = b.load(b.inttoptr(b.add(x_row[r], x_at), _F32.as_pointer()), align=4)
            first = b.insert_element(undefined, value, ir.Constant(_I32, 0))
            spread = b.shuffle_vector(first, undefined, broadcast)
            for j in range(panels * 2):
                raised[r, j] = b.call(fma, [spread, columns[j], sums[r, j]])
        following = b.add(i, _const(1))
        i.add_incoming(following, loop)
        for cell in cells:
            sums[cell].add_incoming(zero, entry)
            sums[cell].add_incoming(raised[cell], loop)
        b.cbranch(b.icmp_signed("<", following, k), loop, done)

        b.position_at_end(done)
        results = {}
        for cell in cells:
            results[cell] = b.phi(_V8)
            results[cell].add_incoming(zero, entry)
            results[cell].add_incoming(raised[cell], loop)
        for r, j in cells:
            address = b.add(b.add(out, b.mul(out_stride, _const(r))), _const(32 * j))
            pointer = b.inttoptr(address, _V8.as_pointer())
            result = results[r, j]
            b.store(b.fadd(result, b.load(pointer, align=4)) if add else result, pointer, align=4)
        return _context.get_dummy_value()

    def tile(  # type: ignore[no-untyped-def]
        typing_context, x, x_stride, w, w_stride, k, out, out_stride
    ):
        return types.void(*[types.int64] * 7), codegen

    made: Callable[..., None] = intrinsic(tile)
    return made


_put_1x4, _put_2x2, _put_3x2 = make_tile(1, 4, False), make_tile(2, 2, False), make_tile(3, 2, False)
_put_1, _put_2, _put_3 = make_tile(1, 1, False), make_tile(2, 1, False), make_tile(3, 1, False)
_put_4, _put_5, _put_6 = make_tile(4, 1, False), make_tile(5, 1, False), make_tile(6, 1, False)
_add_1x4, _add_2x2, _add_3x2 = make_tile(1, 4, True), make_tile(2, 2, True), make_tile(3, 2, True)
_add_1, _add_2, _add_3 = make_tile(1, 1, True), make_tile(2, 1, True), make_tile(3, 1, True)
_add_4, _add_5, _add_6 = make_tile(4, 1, True), make_tile(5, 1, True), make_tile(6, 1, True)


def _prefetch_line(_typing_context, address):  # type: ignore[no-untyped-def]
    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        pointer_type = ir.IntType(8).as_pointer()
        function = insert_function(
            b.module, ir.FunctionType(ir.VoidType(), [pointer_type, _I32, _I32, _I32]), "llvm.prefetch.p0"
        )
        read, keep, data = (ir.Constant(_I32, value) for value in (0, 2, 1))
        b.call(function, [b.inttoptr(args[0], pointer_type), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


_prefetch = cast(Callable[[int], None], intrinsic(_prefetch_line))


@njit(nogil=True)
def prefetch_panel(panel: int, k: int) -> None:
    """Ask for k rows of a panel."""
    for i in range(k):
        _prefetch(panel + i * PANEL_ROW_BYTES)


@njit(nogil=True)
def tile_rows(left: int) -> int:
    """How many rows the next tile takes when `left` are left: few tiles, none of them thin."""
    if left >= 9 or left == 6:
        return 6
    return left if left <= 5 else 4


@njit(nogil=True)
def put_tile(x: int, x_stride: int, w: int, k: int, out: int, out_stride: int, rows: int) -> None:
    """out = X W for 1 to 6 rows and one panel."""
    if rows == 6:
        _put_6(x, x_stride, w, 0, k, out, out_stride)
    elif rows == 5:
        _put_5(x, x_stride, w, 0, k, out, out_stride)
    elif rows == 4:
        _put_4(x, x_stride, w, 0, k, out, out_stride)
    elif rows == 3:
        _put_3(x, x_stride, w, 0, k, out, out_stride)
    elif rows == 2:
        _put_2(x, x_stride, w, 0, k, out, out_stride)
    else:
        _put_1(x, x_stride, w, 0, k, out, out_stride)


@njit(nogil=True)
def add_tile(x: int, x_stride: int, w: int, k: int, out: int, out_stride: int, rows: int) -> None:
    """out += X W for 1 to 6 rows and one panel."""
    if rows == 6:
        _add_6(x, x_stride, w, 0, k, out, out_stride)
    elif rows == 5:
        _add_5(x, x_stride, w, 0, k, out, out_stride)
    elif rows == 4:
        _add_4(x, x_stride, w, 0, k, out, out_stride)
    elif rows == 3:
        _add_3(x, x_stride, w, 0, k, out, out_stride)
    elif rows == 2:
        _add_2(x, x_stride, w, 0, k, out, out_stride)
    else:
        _add_1(x, x_stride, w, 0, k, out, out_stride)


@njit(nogil=True)
def put_few(x: int, x_stride: int, w: int, panels: int, k: int, out: int, out_stride: int, rows: int) -> None:
    """out = X W for 1 to 3 rows and several panels: more accumulators hide the latency of few rows."""
    step = k * PANEL_ROW_BYTES
    p = 0
    if rows == 1:
        while p + 4 <= panels:
            _put_1x4(x, x_stride, w + p * step, step, k, out + p * PANEL_ROW_BYTES, out_stride)
            p += 4
    elif rows == 2:
        while p + 2 <= panels:
            _put_2x2(x, x_stride, w + p * step, step, k, out + p * PANEL_ROW_BYTES, out_stride)
            p += 2
    else:
        while p + 2 <= panels:
            _put_3x2(x, x_stride, w + p * step, step, k, out + p * PANEL_ROW_BYTES, out_stride)
            p += 2
    while p < panels:
        put_tile(x, x_stride, w + p * step, k, out + p * PANEL_ROW_BYTES, out_stride, rows)
        p += 1


@njit(nogil=True)
def add_few(x: int, x_stride: int, w: int, panels: int, k: int, out: int, out_stride: int, rows: int) -> None:
    """out += X W for 1 to 3 rows and several panels."""
    step = k * PANEL_ROW_BYTES
    p = 0
    if rows == 1:
        while p + 4 <= panels:
            _add_1x4(x, x_stride, w + p * step, step, k, out + p * PANEL_ROW_BYTES, out_stride)
            p += 4
    elif rows == 2:
        while p + 2 <= panels:
            _add_2x2(x, x_stride, w + p * step, step, k, out + p * PANEL_ROW_BYTES, out_stride)
            p += 2
    else:
        while p + 2 <= panels:
            _add_3x2(x, x_stride, w + p * step, step, k, out + p * PANEL_ROW_BYTES, out_stride)
            p += 2
    while p < panels:
        add_tile(x, x_stride, w + p * step, k, out + p * PANEL_ROW_BYTES, out_stride, rows)
        p += 1
