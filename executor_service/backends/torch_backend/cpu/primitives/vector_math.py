"""Scalar math that LLVM can vectorize: numba calls libm once per element; LLVM turns these into AVX.

`exp32` is Cephes' expf (Moshier): relative error below 2e-7. NaN stays NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from executor_service.backends.torch_backend.files.architecture.activation import CLAMP, SLOPE

FLAGS = {"reassoc", "contract", "nsz", "arcp"}
"""Fast-math without nnan and ninf: a NaN must reach the row's logits, where it is reported."""

_LOWEST, _HIGHEST = np.float32(-87.3), np.float32(88.0)
_LOG2_E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C0, _C1, _C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C3, _C4, _C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_GELU_1 = np.float32(2 * (2 / np.pi) ** 0.5)
_GELU_3 = np.float32(2 * (2 / np.pi) ** 0.5 * 0.044715)
_CLAMP, _SLOPE = np.float32(CLAMP), np.float32(SLOPE)
_HALF, _ONE, _TWO, _ZERO = np.float32(0.5), np.float32(1.0), np.float32(2.0), np.float32(0.0)


def _exponent(_typing_context, n):  # type: ignore[no-untyped-def]
    def codegen(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        exponent = b.add(b.fptosi(args[0], i32), ir.Constant(i32, 127))
        return b.bitcast(b.shl(exponent, ir.Constant(i32, 23)), ir.FloatType())

    return types.float32(types.float32), codegen


def _bits(_typing_context, bits):  # type: ignore[no-untyped-def]
    def codegen(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


def _float_bits(_typing_context, value):  # type: ignore[no-untyped-def]
    def codegen(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


float_of_bits = cast(Callable[[np.int32], np.float32], intrinsic(_bits))
"""The fp32 with these bits."""
bits_of_float = cast(Callable[[np.float32], np.int32], intrinsic(_float_bits))
"""The bits of an fp32."""
_power_of_two = cast(Callable[[np.float32], np.float32], intrinsic(_exponent))
"""2**n for a whole float n in -126..127, through the exponent's bits."""


@njit(nogil=True)
def _ordered(bits: np.int32) -> np.int32:
    """From an fp32's bits to an int32 that compares as the fp32 does, and back; NaN is an extreme."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(nogil=True)
def largest(values: NDArray[np.float32]) -> np.float32:
    """The largest of values [n], n >= 1, found as integers: LLVM does not vectorize maxima of floats."""
    bits = values.view(np.int32)
    top = _ordered(bits[0])
    for j in range(1, bits.shape[0]):
        one = _ordered(bits[j])
        top = one if one > top else top
    return float_of_bits(_ordered(top))


# All functions that compute floats have flags of their own: numba would take those of the first caller that
# it compiles. Here "reassoc" would undo the two parts of ln 2.
@njit(nogil=True, fastmath={"contract"})
def exp32(x: np.float32) -> np.float32:
    """e**x; 0 below -87.3 and e**88 above 88."""
    clamped = _LOWEST if x < _LOWEST else (_HIGHEST if x > _HIGHEST else x)
    n = np.floor(clamped * _LOG2_E + _HALF)
    f = clamped - n * _LN2_HIGH - n * _LN2_LOW
    y = ((((_C0 * f + _C1) * f + _C2) * f + _C3) * f + _C4) * f + _C5
    y = (y * f * f + f + _ONE) * _power_of_two(n)
    return _ZERO if x < _LOWEST else y


# Python's error model would look for a division by zero, element by element.
@njit(nogil=True, error_model="numpy", fastmath=FLAGS)
def silu32(x: np.float32) -> np.float32:
    """x * sigmoid(x)."""
    return x / (_ONE + exp32(-x))


@njit(nogil=True, error_model="numpy", fastmath=FLAGS)
def gelu32(x: np.float32) -> np.float32:
    """x * (1 + tanh(u)) / 2 = x * sigmoid(2u) for u = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    return x / (_ONE + exp32(-_GELU_1 * x - _GELU_3 * x * x * x))


@njit(nogil=True, error_model="numpy", fastmath=FLAGS)
def clamped32(gate: np.float32, up: np.float32) -> np.float32:
    """`Activation.CLAMPED`: both factors within their bounds, sigmoid(1.702 gate) * gate * (up + 1)."""
    gate = _CLAMP if gate > _CLAMP else gate
    up = _CLAMP if up > _CLAMP else (-_CLAMP if up < -_CLAMP else up)
    return (up + _ONE) * gate / (_ONE + exp32(-_SLOPE * gate))


@njit(nogil=True, error_model="numpy", fastmath=FLAGS)
def tanh32(x: np.float32) -> np.float32:
    """tanh(x) = 1 - 2 / (e**2x + 1): absolute error below 2e-7."""
    return _ONE - _TWO / (exp32(_TWO * x) + _ONE)


@njit(nogil=True, fastmath=FLAGS)
def inverse_norm(x: NDArray[np.float32], eps: np.float32) -> np.float32:
    """1 / sqrt(mean(x^2) + eps)."""
    total = np.float32(0.0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    inverse: np.float32 = np.float32(1.0) / np.sqrt(total / np.float32(x.shape[0]) + eps)
    return inverse
