"""The micro-kernel of every CPU matrix product: *tiles*, a few rows of X times a few panels of 16 columns.

A *panel* holds 16 columns of a K x N matrix as contiguous rows of K. A tile keeps its sums in vector
registers while it walks K once, so each result is one chain of additions in the order of K, whatever the
number of rows and the width of vectors: **a row's result does not depend on its batch**. Written as LLVM IR,
as no loop in Python keeps that many sums in registers. The scheme is the register blocking of BLIS (Van
Zee, van de Geijn 2015). All addresses and strides are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from executor_service.backends.torch_backend.cpu.primitives.memory import insert_function
from executor_service.backends.torch_backend.cpu.primitives.registers import (
    LANES,
    MAX_ROWS,
    ROWS_BY_FOUR,
    ROWS_BY_TWO,
    VECTOR,
)

RESULT_BYTES = 4 * LANES  # of a row, by one panel
_LINE_BYTES = 64
_AHEAD_BYTES = 2048  # how far a tile prefetches its panels: further than the hardware does
_I32, _I64 = ir.IntType(32), ir.IntType(64)

Product = Callable[[int, int, int, int, int, int, int, int, int], None]
"""product(x, x_stride, w, w_stride, panels, k, out, out_stride, rows): out (+)= X W for 1 to MAX_ROWS rows.

`w_stride` is from panel to panel; k is the number of steps along K, of one value each, or two with int8.
"""


class Arithmetic(Protocol):
    """The arithmetic of a tile's step along K, as LLVM IR."""

    name: str
    step_bytes: int  # bytes of a row of X that one step along K reads
    panel_row_bytes: int  # bytes of a panel that one step along K reads
    sums: Any  # LLVM type of a vector of VECTOR sums

    def columns(self, b: Any, address: Any) -> Any:
        """VECTOR columns of a panel, at an address."""

    def spread(self, b: Any, address: Any) -> Any:
        """A row's value at an address, VECTOR times."""

    def added(self, b: Any, sums: Any, values: Any, columns: Any) -> Any:
        """sums + values * columns."""

    def finished(self, b: Any, sums: Any, row: Any, after_columns: Any) -> Any:
        """The sums as fp32 results.

        `row` is the address of the row of X, `after_columns` the address where the panel's columns end. int8
        keeps the scale of the row below the first address and those of the columns at the second.
        """


def spread(b: Any, value: Any) -> Any:
    """A vector of VECTOR copies of the value."""
    undefined = ir.Constant(ir.VectorType(value.type, VECTOR), ir.Undefined)
    first = b.insert_element(undefined, value, ir.Constant(_I32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, VECTOR), [0] * VECTOR))


def make_product(arithmetic: Arithmetic, add: bool) -> Product:
    """out = X W, or out += X W with `add`."""
    by_four = _make_tiles(arithmetic, range(1, ROWS_BY_FOUR + 1), 4, add)
    by_two = _make_tiles(arithmetic, range(ROWS_BY_FOUR + 1, ROWS_BY_TWO + 1), 2, add)
    by_one = _make_tiles(arithmetic, range(1, MAX_ROWS + 1), 1, add)

    @njit(nogil=True, fastmath=False)  # stated: else numba takes over the flags of its first caller
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
        p = 0
        while p < panels:
            from_w, to = w + p * w_stride, out + p * RESULT_BYTES
            if rows <= ROWS_BY_FOUR and p + 4 <= panels:
                by_four(x, x_stride, from_w, w_stride, k, to, out_stride, rows)
                p += 4
            elif ROWS_BY_FOUR < rows <= ROWS_BY_TWO and p + 2 <= panels:
                by_two(x, x_stride, from_w, w_stride, k, to, out_stride, rows)
                p += 2
            else:
                by_one(x, x_stride, from_w, w_stride, k, to, out_stride, rows)
                p += 1

    return cast(Product, product)


def _make_tiles(
    arithmetic: Arithmetic, counts: Iterable[int], panels: int, add: bool
) -> Callable[[int, int, int, int, int, int, int, int], None]:
    """A `Product` of a fixed number of panels, for the numbers of rows in `counts`.

    It is not inlined, because each of its callers would be compiled with all of its tiles.
    """
    name = f"paceline_tiles_{arithmetic.name}_{panels}_{int(add)}"

    def codegen(context: Any, caller: Any, _signature: Any, args: Any) -> Any:
        function = insert_function(caller.module, ir.FunctionType(ir.VoidType(), [_I64] * 8), name)
        if not function.blocks:
            function.linkage = "linkonce_odr"
            function.attributes.add("noinline")
            function.attributes.add("optsize")
            _tiles(ir.IRBuilder(function.append_basic_block("entry")), function.args)
        caller.call(function, args)
        return context.get_dummy_value()

    def _tiles(b: Any, args: Any) -> None:
        done = b.append_basic_block("done")
        switch = b.switch(args[7], done)
        for rows in counts:
            block = b.append_basic_block(f"tile_{rows}")
            switch.add_case(ir.Constant(_I64, rows), block)
            b.position_at_end(block)
            _tile(b, arithmetic, rows, panels, add, args[:7])
            b.branch(done)
        b.position_at_end(done)
        b.ret_void()

    def tiles(  # type: ignore[no-untyped-def]
        typing_context, x, x_stride, w, w_stride, k, out, out_stride, rows
    ):
        return types.void(*[types.int64] * 8), codegen

    return cast(Callable[[int, int, int, int, int, int, int, int], None], intrinsic(tiles))


def _const(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _tile(b: Any, arithmetic: Arithmetic, rows: int, panels: int, add: bool, args: Any) -> None:
    """Emit one tile at the builder's position: `rows` rows of X times `panels` panels, over k steps.

    `args` are the first seven arguments of a `Product` without its number of panels, as 64-bit values. Leaves
    the builder in the last block, without a terminator.
    """
    x, x_stride, w, w_stride, k, out, out_stride = args
    zero = ir.Constant(arithmetic.sums, [0] * VECTOR)
    parts = LANES // VECTOR  # vectors of a panel
    part_bytes = arithmetic.panel_row_bytes // parts
    cells = [(r, j) for r in range(rows) for j in range(panels * parts)]

    entry, loop, done = b.block, b.append_basic_block("k_loop"), b.append_basic_block("k_done")
    x_row = [b.add(x, b.mul(x_stride, _const(r))) for r in range(rows)]
    w_panel = [b.add(w, b.mul(w_stride, _const(p))) for p in range(panels)]
    b.cbranch(b.icmp_signed(">", k, _const(0)), loop, done)

    b.position_at_end(loop)
    i = b.phi(_I64)
    i.add_incoming(_const(0), entry)
    sums = {cell: b.phi(arithmetic.sums) for cell in cells}
    x_at, w_at = b.mul(i, _const(arithmetic.step_bytes)), b.mul(i, _const(arithmetic.panel_row_bytes))
    columns = [
        arithmetic.columns(b, b.add(panel, b.add(w_at, _const(part * part_bytes))))
        for panel in w_panel
        for part in range(parts)
    ]
    for panel in w_panel:
        for line in range(0, arithmetic.panel_row_bytes, _LINE_BYTES):
            prefetch_at(b, b.add(panel, b.add(w_at, _const(_AHEAD_BYTES + line))))
    added = {}
    for r in range(rows):
        values = arithmetic.spread(b, b.add(x_row[r], x_at))
        for j, column in enumerate(columns):
            added[r, j] = arithmetic.added(b, sums[r, j], values, column)
    following = b.add(i, _const(1))
    i.add_incoming(following, loop)
    for cell in cells:
        sums[cell].add_incoming(zero, entry)
        sums[cell].add_incoming(added[cell], loop)
    b.cbranch(b.icmp_signed("<", following, k), loop, done)

    b.position_at_end(done)
    results = {}
    for cell in cells:
        results[cell] = b.phi(arithmetic.sums)
        results[cell].add_incoming(zero, entry)
        results[cell].add_incoming(added[cell], loop)
    after_columns = [
        b.add(panel, b.add(b.mul(k, _const(arithmetic.panel_row_bytes)), _const(4 * VECTOR * part)))
        for panel in w_panel
        for part in range(parts)
    ]
    for (r, j), sums_of in results.items():
        result = arithmetic.finished(b, sums_of, x_row[r], after_columns[j])
        address = b.add(b.add(out, b.mul(out_stride, _const(r))), _const(4 * VECTOR * j))
        pointer = b.inttoptr(address, result.type.as_pointer())
        b.store(b.fadd(result, b.load(pointer, align=4)) if add else result, pointer, align=4)


def prefetch_at(b: Any, address: Any) -> None:
    """Emit the prefetch of the 64 bytes at an address."""
    pointer_type = ir.IntType(8).as_pointer()
    function = insert_function(
        b.module, ir.FunctionType(ir.VoidType(), [pointer_type, _I32, _I32, _I32]), "llvm.prefetch.p0"
    )
    read, keep, data = (ir.Constant(_I32, value) for value in (0, 2, 1))
    b.call(function, [b.inttoptr(address, pointer_type), read, keep, data])


def _prefetch_line(_typing_context, address):  # type: ignore[no-untyped-def]
    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        prefetch_at(b, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


prefetch = cast(Callable[[int], None], intrinsic(_prefetch_line))
"""Prefetch the 64 bytes at an address."""
