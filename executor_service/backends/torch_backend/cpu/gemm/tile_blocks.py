"""Tiles over weights in blocks of 32, times activations in blocks of int8: `block_layout` describes both.

A block's products are summed in int32, which is exact; the sum becomes fp32 and is multiplied by the scale of
the weights, then by that of the activations, and added to the result, after which the minimum is added, times
the sum of the activations. Each result is one chain along K, whatever the number of rows, the width of
vectors and the instructions: **a row's result does not depend on its batch**.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from executor_service.backends.torch_backend.cpu.gemm.block_layout import (
    OFFSET,
    ROW_BLOCK_BYTES,
    ROW_SCALE,
    ROW_SUMS,
    ROW_WEIGHTED_SUM,
    STEP,
    Layout,
)
from executor_service.backends.torch_backend.cpu.gemm.dot_bytes import (
    BYTES,
    Size,
    Sums,
    byte_sums,
    filled,
    keep_in_memory,
    nibble_sums,
)
from executor_service.backends.torch_backend.cpu.gemm.tile import RESULT_BYTES, Product, prefetch_at, spread
from executor_service.backends.torch_backend.cpu.primitives.memory import insert_function
from executor_service.backends.torch_backend.cpu.primitives.registers import LANES, MAX_ROWS, VECTOR

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _HALVES = ir.VectorType(_F32, VECTOR), ir.VectorType(ir.HalfType(), VECTOR)
_PARTS = LANES // VECTOR  # vectors of a panel
_LINE_BYTES = 64
_AHEAD_BYTES = 2048
_ROWS_IN_MEMORY = MAX_ROWS + 1 if VECTOR == LANES else 3
"""Rows from which the totals are kept in memory, since registers hold the sums of a block. AVX-512 has 32
registers, with room for both."""

_Tiles = Callable[[int, int, int, int, int, int, int, int], None]
"""tiles(x, x_stride, w, blocks, out, out_stride, rows, add): one panel."""


class Tiles:
    """The products over panels of one layout."""

    def __init__(self, layout: Layout) -> None:
        tiles = _make_tiles(layout)
        self.put_tile, self.add_tile = _all_panels(tiles, 0), _all_panels(tiles, 1)


def _all_panels(tiles: _Tiles, add: int) -> Product:
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
        for p in range(panels):
            tiles(x, x_stride, w + p * w_stride, k, out + p * RESULT_BYTES, out_stride, rows, add)

    return cast(Product, product)


def _make_tiles(layout: Layout) -> _Tiles:
    name = f"paceline_tiles_{layout.name}"

    def codegen(context: Any, caller: Any, _signature: Any, args: Any) -> Any:
        function = insert_function(caller.module, ir.FunctionType(ir.VoidType(), [_I64] * 8), name)
        if not function.blocks:
            function.linkage = "linkonce_odr"
            function.attributes.add("noinline")
            _all_rows(ir.IRBuilder(function.append_basic_block("entry")), function.args)
        caller.call(function, args)
        return context.get_dummy_value()

    def _all_rows(b: Any, args: Any) -> None:
        done = b.append_basic_block("done")
        switch = b.switch(args[6], done)
        for rows in range(1, MAX_ROWS + 1):
            block = b.append_basic_block(f"tile_{rows}")
            switch.add_case(ir.Constant(_I64, rows), block)
            b.position_at_end(block)
            _Tile(b, layout, rows, args).emit()
            b.branch(done)
        b.position_at_end(done)
        b.ret_void()

    def tiles(typing_context, x, x_stride, w, blocks, out, out_stride, rows, add):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 8), codegen

    return cast(_Tiles, intrinsic(tiles))


def _const(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


class _Tile:
    """Emits one tile at the builder's position: some rows times one panel."""

    def __init__(self, b: Any, layout: Layout, rows: int, args: Any) -> None:
        self.b, self.layout = b, layout
        x, x_stride, self.w, self.blocks, self.out, self.out_stride, _, self.add = args
        self.rows = [b.add(x, b.mul(x_stride, _const(r))) for r in range(rows)]

    def emit(self) -> None:
        """Emit the tile; leaves the builder in its last block, without a terminator."""
        b, zero = self.b, ir.Constant(_FLOATS, [0.0] * VECTOR)
        cells = [(r, part) for r in range(len(self.rows)) for part in range(_PARTS)]
        places = {}
        for cell in cells:
            with b.goto_entry_block():
                places[cell] = b.alloca(_FLOATS)
            b.store(zero, places[cell])
        if len(self.rows) >= _ROWS_IN_MEMORY:
            keep_in_memory(b, list(places.values()))
        entry, loop, done = b.block, b.append_basic_block("block"), b.append_basic_block("blocks_done")
        b.cbranch(b.icmp_signed(">", self.blocks, _const(0)), loop, done)
        b.position_at_end(loop)
        i = b.phi(_I64)
        i.add_incoming(_const(0), entry)
        self._block(b.mul(i, _const(self.layout.block_bytes)), b.mul(i, _const(ROW_BLOCK_BYTES)), places)
        following = b.add(i, _const(1))
        i.add_incoming(following, loop)
        b.cbranch(b.icmp_signed("<", following, self.blocks), loop, done)
        b.position_at_end(done)
        for r, part in cells:
            address = b.add(b.add(self.out, b.mul(self.out_stride, _const(r))), _const(4 * VECTOR * part))
            pointer = b.inttoptr(address, _FLOATS.as_pointer())
            total = b.load(places[r, part])
            added = b.fadd(total, b.load(pointer, align=4))
            b.store(b.select(b.icmp_signed("!=", self.add, _const(0)), added, total), pointer, align=4)

    def _block(self, w_at: Any, x_at: Any, totals: Sums) -> None:
        """Add one block to the totals, which are in memory."""
        b, layout = self.b, self.layout
        w, rows = b.add(self.w, w_at), [b.add(row, x_at) for row in self.rows]
        for line in range(0, layout.block_bytes, _LINE_BYTES):
            prefetch_at(b, b.add(w, _const(_AHEAD_BYTES + line)))
        steps = layout.group // STEP
        for group in range(layout.groups):
            first = group * steps

            def codes(step: int, part: int, first: int = first) -> Any:
                return self._codes(w, first + step, part)

            def xs(step: int, r: int, first: int = first) -> Any:
                return self._spread(rows[r], STEP * (first + step), _I32, BYTES)

            size, sums = Size(steps, len(rows), _PARTS), [self._sum_of_row(row, group) for row in rows]
            if layout.nibbles:
                found = nibble_sums(b, size, codes, xs, sums, 0 if layout.minima else OFFSET)
            else:
                found = byte_sums(b, size, codes, xs, sums)
            self._add(totals, found, w, rows, group)

    def _add(self, totals: Sums, sums: Sums, w: Any, rows: list[Any], group: int) -> None:
        """Add a group's sums to the totals, multiplied by the scales, and what the minima add."""
        b, layout = self.b, self.layout
        for part in range(_PARTS):
            at = layout.codes_bytes + (group * LANES + part * VECTOR) * layout.scale_bytes
            scales = self._scales(w, at)
            minima = self._scales(w, at + layout.scales_bytes) if layout.minima else None
            for r, row in enumerate(rows):
                scale = self._spread(row, ROW_SCALE, _F32)
                scaled = b.fmul(b.sitofp(sums[r, part], _FLOATS), scales)
                total = self._fused(scaled, scale, b.load(totals[r, part]))
                if minima is not None:
                    total = self._fused(minima, self._weighted_sum(row, group, scale), total)
                b.store(total, totals[r, part])

    def _codes(self, w: Any, step: int, part: int) -> Any:
        b, width = self.b, BYTES.count
        line = step // 2 if self.layout.nibbles else step
        address = b.add(w, _const(line * STEP * LANES + part * width))
        loaded = b.load(b.inttoptr(address, BYTES.as_pointer()), align=1)
        if not self.layout.nibbles:
            return loaded
        if step % 2 == 0:
            return b.and_(loaded, filled(BYTES, 15))
        return b.lshr(loaded, filled(BYTES, 4))

    def _spread(self, row: Any, at: int, kind: Any, to: Any = None) -> Any:
        """A number of a row, VECTOR times."""
        b = self.b
        loaded = b.load(b.inttoptr(b.add(row, _const(at)), kind.as_pointer()), align=4)
        vector = spread(b, loaded)
        return vector if to is None else b.bitcast(vector, to)

    def _sum_of_row(self, row: Any, group: int) -> Any:
        """The sum of a group of activations."""
        b = self.b
        if self.layout.groups == 1:
            return b.add(self._spread(row, ROW_SUMS, _I32), self._spread(row, ROW_SUMS + 4, _I32))
        return self._spread(row, ROW_SUMS + 4 * group, _I32)

    def _weighted_sum(self, row: Any, group: int, scale: Any) -> Any:
        if self.layout.groups == 1:
            return self._spread(row, ROW_WEIGHTED_SUM, _F32)
        b = self.b
        return b.fmul(b.sitofp(self._spread(row, ROW_SUMS + 4 * group, _I32), _FLOATS), scale)

    def _scales(self, w: Any, at: int) -> Any:
        b, address = self.b, self.b.add(w, _const(at))
        if self.layout.wide:
            return b.load(b.inttoptr(address, _FLOATS.as_pointer()), align=4)
        return b.fpext(b.load(b.inttoptr(address, _HALVES.as_pointer()), align=2), _FLOATS)

    def _fused(self, one: Any, other: Any, total: Any) -> Any:
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        return self.b.call(
            insert_function(self.b.module, kind, f"llvm.fma.v{VECTOR}f32"), [one, other, total]
        )
