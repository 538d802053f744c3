"""Quantization of rows to the blocks of int8 that the tiles of `tile_blocks.py` multiply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from executor_service.backends.torch_backend.cpu.gemm.block_layout import (
    BLOCK,
    LARGEST_ACTIVATION,
    ROW_BLOCK_BYTES,
    ROW_SCALE,
    ROW_SUMS,
    ROW_WEIGHTED_SUM,
)
from executor_service.backends.torch_backend.cpu.primitives.kernel import (
    Kernel,
    count_row_chunks,
    rows_of_chunk,
)
from executor_service.backends.torch_backend.cpu.primitives.memory import insert_function
from executor_service.backends.torch_backend.cpu.primitives.records import Address, reader

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _INTS, _BYTES = (ir.VectorType(kind, BLOCK) for kind in (_F32, _I32, ir.IntType(8)))
_INFINITY, _NO_SIGN, _NAN = 0x7F800000, 0x7FFFFFFF, 0x7FC00000  # bits of fp32
_NEGLIGIBLE = 1e-30  # a block of less is zero: the inverse of its scale would overflow


class QuantizeBlocks(NamedTuple):
    """X to int8, block by block: scale = max |x| / 127, and x / scale rounded, ties to even.

    A block with a NaN or an infinity gets the scale NaN, and so a result of NaN.
    """

    rows: int
    x: Address  # fp32 [rows, k]
    out: Address  # blocks of activations, as `block_layout` describes them
    k: int  # a multiple of 32


_read = reader(QuantizeBlocks)


def _quantize(_typing_context, x, out):  # type: ignore[no-untyped-def]
    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        _emit(b, *args)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _call(b: Any, name: str, result: Any, *values: Any) -> Any:
    kind = ir.FunctionType(result, [value.type for value in values])
    return b.call(insert_function(b.module, kind, name), values)


def _filled(b: Any, value: Any) -> Any:
    kind = ir.VectorType(value.type, BLOCK)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_I32, 0))
    return b.shuffle_vector(
        first, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(_I32, BLOCK), [0] * BLOCK)
    )


def _emit(b: Any, x: Any, out: Any) -> None:
    """Emit the quantization of one block."""

    def put(value: Any, at: int) -> None:
        b.store(value, b.inttoptr(b.add(out, ir.Constant(_I64, at)), value.type.as_pointer()), align=4)

    numbers = b.load(b.inttoptr(x, _FLOATS.as_pointer()), align=4)
    # Magnitudes compare as their bits do, with NaN above all others: the maximum is one of integers.
    bits = b.and_(b.bitcast(numbers, _INTS), ir.Constant(_INTS, [_NO_SIGN] * BLOCK))
    largest = _call(b, f"llvm.vector.reduce.smax.v{BLOCK}i32", _I32, bits)
    magnitude = b.bitcast(largest, _F32)
    most, zero = ir.Constant(_F32, float(LARGEST_ACTIVATION)), ir.Constant(_F32, 0.0)
    finite = b.icmp_signed("<", largest, ir.Constant(_I32, _INFINITY))
    used = b.and_(finite, b.fcmp_ordered(">=", magnitude, ir.Constant(_F32, _NEGLIGIBLE)))
    inverse = b.select(used, b.fdiv(most, magnitude), zero)
    nan = b.bitcast(ir.Constant(_I32, _NAN), _F32)
    scale = b.select(finite, b.select(used, b.fdiv(magnitude, most), zero), nan)
    # Zero times an infinity would be NaN, which has no integer.
    safe = b.select(_filled(b, used), numbers, ir.Constant(_FLOATS, [0.0] * BLOCK))
    rounded = _call(b, f"llvm.rint.v{BLOCK}f32", _FLOATS, b.fmul(safe, _filled(b, inverse)))
    wide = b.fptosi(rounded, _INTS)
    put(b.trunc(wide, _BYTES), 0)
    put(scale, ROW_SCALE)
    halves = [
        _call(
            b,
            f"llvm.vector.reduce.add.v{BLOCK // 2}i32",
            _I32,
            b.shuffle_vector(
                wide,
                wide,
                ir.Constant(ir.VectorType(_I32, BLOCK // 2), list(range(first, first + BLOCK // 2))),
            ),
        )
        for first in (0, BLOCK // 2)
    ]
    for half, total in enumerate(halves):
        put(total, ROW_SUMS + 4 * half)
    put(b.fmul(b.sitofp(b.add(*halves), _F32), scale), ROW_WEIGHTED_SUM)


quantize_block = cast(Callable[[int, int], None], intrinsic(_quantize))
"""(x, out): a block of fp32 at an address to one of int8 at another."""


@njit(nogil=True)
def _count_chunks(record: int) -> int:
    return count_row_chunks(_read(record).rows)


@njit(nogil=True, fastmath=False)
def _compute_chunk(record: int, chunk: int) -> None:
    call = _read(record)
    blocks = call.k // BLOCK
    for r in rows_of_chunk(call.rows, chunk):
        x, out = call.x + 4 * call.k * r, call.out + ROW_BLOCK_BYTES * blocks * r
        for i in range(blocks):
            quantize_block(x + 4 * BLOCK * i, out + ROW_BLOCK_BYTES * i)


QUANTIZE_BLOCKS = Kernel(QuantizeBlocks, _count_chunks, _compute_chunk)
