"""The block formats of GGUF files that kernels can multiply, as numbers, scales and minima.

Each function takes the blocks of some rows, as one structured array [rows, blocks of a row], and returns

    numbers  int8 [rows, blocks, numbers of a block]
    scales   fp32 [rows, blocks, scales of a block]
    minima   the same, or None

in the order of K. A number's value is number * scale + minimum, in fp32, as ggml defines its formats
(ggml/src/ggml-common.h has the structures, ggml-quants.c what they mean).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[Any]
Numbers = NDArray[np.int8]
Floats = NDArray[np.float32]
Unpacked = tuple[Numbers, Floats, Floats | None]

_SUPER = 256  # numbers of a block of the K formats
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # times two


class BlockFormat(NamedTuple):
    """One type of tensor."""

    name: str
    size: int  # numbers of a block
    dtype: np.dtype[Any]  # of a block
    unpack: Callable[[Blocks], Unpacked]


def _f32(values: Any) -> Floats:
    """One scale of each block."""
    wide: Floats = values.astype(np.float32)[..., None]
    return wide


def _nibbles(stored: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bytes [..., n] to nibbles [..., 2 n], all lower halves first."""
    return np.concatenate([stored & 15, stored >> 4], -1)


def _bit_five(stored: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """32 bits to bytes, 0 or 16."""
    return np.unpackbits(stored, axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(b: Blocks) -> Unpacked:
    return _nibbles(b["qs"]).view(np.int8) - np.int8(8), _f32(b["d"]), None


def _q4_1(b: Blocks) -> Unpacked:
    return _nibbles(b["qs"]).view(np.int8), _f32(b["d"]), _f32(b["m"])


def _q5_0(b: Blocks) -> Unpacked:
    numbers = (_nibbles(b["qs"]) | _bit_five(b["qh"])).view(np.int8)
    return numbers - np.int8(16), _f32(b["d"]), None


def _q5_1(b: Blocks) -> Unpacked:
    return (_nibbles(b["qs"]) | _bit_five(b["qh"])).view(np.int8), _f32(b["d"]), _f32(b["m"])


def _q8_0(b: Blocks) -> Unpacked:
    return b["qs"].copy(), _f32(b["d"]), None


def _iq4_nl(b: Blocks) -> Unpacked:
    return _IQ4[_nibbles(b["qs"])], _f32(b["d"]), None


def _mxfp4(b: Blocks) -> Unpacked:
    # Half of 2^(e - 127), since the numbers are doubled: exact, also where it is denormal.
    scales = np.ldexp(np.float32(1.0), b["e"].astype(np.int32) - 128)
    return _E2M1[_nibbles(b["qs"])], _f32(scales), None


def _q2_k(b: Blocks) -> Unpacked:
    numbers = _shifted(b["qs"].reshape(*b.shape, 2, 1, 32), (0, 2, 4, 6), 3)
    scales, minima = b["scales"] & 15, b["scales"] >> 4
    return numbers, _f32(b["d"]) * scales.astype(np.float32), -(_f32(b["dmin"]) * minima.astype(np.float32))


def _q3_k(b: Blocks) -> Unpacked:
    low = _shifted(b["qs"].reshape(*b.shape, 2, 1, 32), (0, 2, 4, 6), 3)
    high = _shifted(b["hmask"].reshape(*b.shape, 1, 1, 32), range(8), 1)
    low_scales = _nibbles(b["scales"][..., :8])
    high_scales = _shifted(b["scales"][..., 8:].reshape(*b.shape, 1, 1, 4), (0, 2, 4, 6), 3)
    scales = (low_scales.view(np.int8) | (high_scales << 4)) - np.int8(32)
    return low + (high << 2) - np.int8(4), _f32(b["d"]) * scales.astype(np.float32), None


def _shifted(stored: NDArray[np.uint8], shifts: Any, mask: int) -> Numbers:
    """[..., parts, 1, bytes] to [..., numbers]: of each part all bytes shifted once by each of the shifts."""
    places = np.array(list(shifts), np.uint8)[:, None]
    values = (stored >> places) & np.uint8(mask)
    return values.reshape(*stored.shape[:-3], -1).view(np.int8)


def _six_bits(stored: NDArray[np.uint8]) -> tuple[Floats, Floats]:
    """Eight scales and eight minima of 6 bits, which share 12 bytes."""
    low, high, rest = stored[..., :4], stored[..., 4:8], stored[..., 8:]
    scales = np.concatenate([low & 63, (rest & 15) | ((low >> 6) << 4)], -1)
    minima = np.concatenate([high & 63, (rest >> 4) | ((high >> 6) << 4)], -1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q4_k(b: Blocks) -> Unpacked:
    scales, minima = _six_bits(b["scales"])
    numbers = _nibbles(b["qs"].reshape(*b.shape, 4, 32)).reshape(*b.shape, _SUPER).view(np.int8)
    return numbers, _f32(b["d"]) * scales, -(_f32(b["dmin"]) * minima)


def _q5_k(b: Blocks) -> Unpacked:
    scales, minima = _six_bits(b["scales"])
    numbers = _nibbles(b["qs"].reshape(*b.shape, 4, 32)).reshape(*b.shape, _SUPER).view(np.int8)
    high = _shifted(b["qh"].reshape(*b.shape, 1, 1, 32), range(8), 1)
    return numbers | (high << 4), _f32(b["d"]) * scales, -(_f32(b["dmin"]) * minima)


def _q6_k(b: Blocks) -> Unpacked:
    low = _nibbles(b["ql"].reshape(*b.shape, 2, 64)).reshape(*b.shape, _SUPER).view(np.int8)
    high = _shifted(b["qh"].reshape(*b.shape, 2, 1, 32), (0, 2, 4, 6), 3)
    return (low | (high << 4)) - np.int8(32), _f32(b["d"]) * b["scales"].astype(np.float32), None


def _iq4_xs(b: Blocks) -> Unpacked:
    low = np.stack([b["scales_l"] & 15, b["scales_l"] >> 4], -1).reshape(*b.shape, 8)
    high = (b["scales_h"][..., None] >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & 3
    scales = (low | (high << 4)).view(np.int8) - np.int8(32)
    numbers = _IQ4[_nibbles(b["qs"].reshape(*b.shape, 8, 16))].reshape(*b.shape, _SUPER)
    return numbers, _f32(b["d"]) * scales.astype(np.float32), None


def _format(name: str, size: int, unpack: Callable[[Blocks], Unpacked], *fields: Any) -> BlockFormat:
    return BlockFormat(name, size, np.dtype(list(fields)), unpack)


_D, _M, _DMIN = ("d", "<f2"), ("m", "<f2"), ("dmin", "<f2")

FORMATS: Mapping[int, BlockFormat] = {
    2: _format("Q4_0", 32, _q4_0, _D, ("qs", "u1", 16)),
    3: _format("Q4_1", 32, _q4_1, _D, _M, ("qs", "u1", 16)),
    6: _format("Q5_0", 32, _q5_0, _D, ("qh", "u1", 4), ("qs", "u1", 16)),
    7: _format("Q5_1", 32, _q5_1, _D, _M, ("qh", "u1", 4), ("qs", "u1", 16)),
    8: _format("Q8_0", 32, _q8_0, _D, ("qs", "i1", 32)),
    10: _format("Q2_K", _SUPER, _q2_k, ("scales", "u1", 16), ("qs", "u1", 64), _D, _DMIN),
    11: _format("Q3_K", _SUPER, _q3_k, ("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), _D),
    12: _format("Q4_K", _SUPER, _q4_k, _D, _DMIN, ("scales", "u1", 12), ("qs", "u1", 128)),
    13: _format("Q5_K", _SUPER, _q5_k, _D, _DMIN, ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)),
    14: _format("Q6_K", _SUPER, _q6_k, ("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _D),
    20: _format("IQ4_NL", 32, _iq4_nl, _D, ("qs", "u1", 16)),
    23: _format("IQ4_XS", _SUPER, _iq4_xs, _D, ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)),
    39: _format("MXFP4", 32, _mxfp4, ("e", "u1"), ("qs", "u1", 16)),
}
"""By ggml type."""


def unpack(kind: int, rows: NDArray[np.uint8]) -> Unpacked:
    """The rows [n, bytes] of a tensor of a type in FORMATS: numbers [n, k], scales [n, groups] and minima."""
    form = FORMATS[kind]
    with np.errstate(all="ignore"):  # scales that are not finite are found by `FiniteCheckpoint`
        numbers, scales, minima = form.unpack(np.ascontiguousarray(rows).view(form.dtype))
    n = len(rows)
    flat = None if minima is None else np.ascontiguousarray(minima).reshape(n, -1)
    return np.ascontiguousarray(numbers).reshape(n, -1), np.ascontiguousarray(scales).reshape(n, -1), flat
