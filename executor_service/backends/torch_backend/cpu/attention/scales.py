"""The scales of int8 keys and values, the same as those of `page_format`: bf16, one for each vector.

A tile's scales are those of the keys of its 16 positions, then those of their values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.primitives.memory import pointer
from executor_service.backends.torch_backend.cpu.primitives.registers import LANES, VECTOR
from executor_service.backends.torch_backend.cpu.primitives.vector_math import bits_of_float, float_of_bits

KINDS = 2  # of scales: keys', values'
SCALE_BYTES = 2
KIND_BYTES = SCALE_BYTES * LANES  # of a tile

_LARGEST = np.float32(127)
_LEAST = np.float32(1e-30)  # see `page_format.LEAST`
_INFINITY, _NO_SIGN, _NAN = np.int32(0x7F800000), np.int32(0x7FFFFFFF), np.int32(0x7FC00000)  # bits of fp32
_BELOW_SCALE = np.int32(0xFFFF)  # bits that an fp32 has below those of a bf16
_F32, _I32 = ir.VectorType(ir.FloatType(), VECTOR), ir.VectorType(ir.IntType(32), VECTOR)
_SCALES = ir.VectorType(ir.IntType(16), VECTOR)


@njit(nogil=True, error_model="numpy", fastmath={"contract"})
def put_scale(address: int, vector: NDArray[np.float32]) -> np.float32:
    """Write the scale of a vector to an address, and return it; NaN where the vector is not finite."""
    bits = vector.view(np.int32)
    largest = np.int32(0)  # magnitudes compare as their bits do, with NaN above all others
    for d in range(vector.shape[0]):
        largest = max(largest, np.int32(bits[d] & _NO_SIGN))
    scale = _NAN
    if largest < _INFINITY:
        magnitude = max(float_of_bits(largest), _LEAST)
        scale = np.int32((bits_of_float(magnitude / _LARGEST) + _BELOW_SCALE) & ~_BELOW_SCALE)
    carray(pointer(address), (1,), np.int16)[0] = np.int16(scale >> np.int32(16))
    return float_of_bits(scale)


@njit(nogil=True, error_model="numpy", fastmath={"contract"})
def put_byte(address: int, value: np.float32, scale: np.float32) -> None:
    """Write value / scale, rounded, ties to even; 0 where the scale is NaN."""
    quotient = np.rint(value / scale)
    carray(pointer(address), (1,), np.int8)[0] = np.int8(np.int32(quotient if scale == scale else 0))


def _scale_row(_typing_context, numbers, scales):  # type: ignore[no-untyped-def]
    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        for part in range(LANES // VECTOR):
            at = [
                b.add(arg, ir.Constant(arg.type, size * VECTOR * part))
                for arg, size in zip(args, (4, 2), strict=True)
            ]
            row = b.inttoptr(at[0], _F32.as_pointer())
            high = b.zext(b.load(b.inttoptr(at[1], _SCALES.as_pointer()), align=2), _I32)
            factors = b.bitcast(b.shl(high, ir.Constant(_I32, [16] * VECTOR)), _F32)
            b.store(b.fmul(b.load(row, align=4), factors), row, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


_scale_one_row = cast(Callable[[int, int], None], intrinsic(_scale_row))


@njit(nogil=True)
def scale_columns(numbers: int, stride: int, rows: int, scales: int) -> None:
    """Multiply 16 columns of fp32 rows, `stride` bytes apart, by 16 scales of one kind."""
    for r in range(rows):
        _scale_one_row(numbers + r * stride, scales)
