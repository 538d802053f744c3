"""Keys and values of 8 bits in Triton: the numbers and scales of `page_format.rounded`, from fp32."""

from __future__ import annotations

import triton
import triton.language as tl

from executor_service.backends.torch_backend.ops.page_format import LEAST

_LEAST = tl.constexpr(LEAST)
_INFINITY, _NAN, _NO_SIGN = tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000), tl.constexpr(0x7FFFFFFF)
_BELOW_SCALE = tl.constexpr(0xFFFF)  # bits that an fp32 has below those of a bf16
_TO_NEAREST = tl.constexpr(12_582_912.0)  # 1.5 * 2^23: added and subtracted, it rounds; ties to even


@triton.jit
def magnitude(x):
    """The largest magnitude in x, as an int32 that compares as it does; that of a NaN is above all others."""
    return tl.max(x.to(tl.int32, bitcast=True) & _NO_SIGN, 0)


@triton.jit
def scale_bits(largest, largest_number: tl.constexpr):
    """The scale of a vector as the bits of an fp32, of which the upper half are those of a bf16.

    `largest`: the vector's `magnitude`; `largest_number`: the format's.
    """
    number = tl.maximum(largest.to(tl.float32, bitcast=True), _LEAST)
    bits = tl.div_rn(number, largest_number * 1.0).to(tl.int32, bitcast=True)
    return tl.where(largest < _INFINITY, (bits + _BELOW_SCALE) & ~_BELOW_SCALE, _NAN)


@triton.jit
def scale_word(k_bits, v_bits):
    """What `page_format.scale_words` holds of a key's and a value's `scale_bits`."""
    return v_bits | (k_bits >> 16)


@triton.jit
def scales_of_word(word):
    """The scales in fp32 of keys and of values, from words of `page_format.scale_words`."""
    return (word << 16).to(tl.float32, bitcast=True), (word & ~_BELOW_SCALE).to(tl.float32, bitcast=True)


@triton.jit
def rounded(x, bits, dtype: tl.constexpr):
    """x / scale in an 8-bit dtype, from the scale's bits; 0 where the scale is NaN."""
    scale = bits.to(tl.float32, bitcast=True)
    numbers = tl.where(scale == scale, tl.div_rn(x, scale), 0.0)
    if dtype == tl.int8:
        numbers = (numbers + _TO_NEAREST - _TO_NEAREST).to(tl.int32)
    return numbers.to(dtype)
