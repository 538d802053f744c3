"""Products of bytes, four along K at once, as this processor has them, in LLVM IR.

Sums are int32 and exact, so they are the same with all instructions. `VNNI` and the instructions of AVX2 and
AVX-512 multiply unsigned by signed bytes: nibbles are unsigned, signed bytes become unsigned by 128 more, or
give their sign to the other factor. pmaddubsw adds two products in 16 bits and saturates; nibbles are so
small that a block's sums fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir  # type: ignore[import-untyped]

from executor_service.backends.torch_backend.cpu.gemm.block_layout import LARGEST_ACTIVATION, STEP
from executor_service.backends.torch_backend.cpu.primitives.memory import insert_function
from executor_service.backends.torch_backend.cpu.primitives.registers import FEATURES, VECTOR

INTS = ir.VectorType(ir.IntType(32), VECTOR)
BYTES = ir.VectorType(ir.IntType(8), STEP * VECTOR)
"""Of VECTOR columns, STEP numbers each."""

_SHORTS = ir.VectorType(ir.IntType(16), 2 * VECTOR)
_WIDE = ir.VectorType(ir.IntType(32), STEP * VECTOR)
_LARGEST_NIBBLE = 15
_SIGN = 128
_SUMS_IN_SHORTS = 32767 // (2 * LARGEST_ACTIVATION * _LARGEST_NIBBLE)  # steps, 8: a whole block

_BITS = 32 * VECTOR
VNNI = ("+avx512vnni" if VECTOR == 16 else "+avxvnni") in FEATURES
_AVX = "+avx2" in FEATURES if VECTOR == 8 else "+avx512bw" in FEATURES
_SIGNS = VECTOR == 8 and _AVX  # psignb
INSTRUCTIONS = "vpdpbusd" if VNNI else "pmaddubsw" if _AVX else "plain"
"""What multiplies, for logs and benchmarks."""


class Size(NamedTuple):
    """Of one sum."""

    steps: int
    rows: int
    parts: int  # vectors of columns


def filled(kind: Any, value: int) -> ir.Constant:
    """A vector of one number."""
    return ir.Constant(kind, [value] * kind.count)


def _call(b: Any, name: str, result: Any, *values: Any) -> Any:
    kind = ir.FunctionType(result, [value.type for value in values])
    return b.call(insert_function(b.module, kind, name), values)


Load = Callable[[int, int], Any]
"""load(step, i): BYTES of a step, of a vector of columns or of a row."""
Sums = dict[tuple[int, int], Any]
"""INTS by row and vector of columns."""


def nibble_sums(b: Any, size: Size, codes: Load, xs: Load, sums: Sequence[Any], offset: int) -> Sums:
    """Sums of (nibble - offset) * x along some steps. `sums`: of each row, INTS of its activations' sum."""
    if VNNI:
        begin = [b.mul(total, filled(INTS, -offset)) if offset else filled(INTS, 0) for total in sums]
        return _vnni_sums(b, size, codes, xs, begin)
    found = _short_sums(b, size, codes, xs) if _AVX else _plain_sums(b, size, codes, xs, signed=False)
    if not offset:
        return found
    less = [b.mul(total, filled(INTS, offset)) for total in sums]
    return {(r, part): b.sub(total, less[r]) for (r, part), total in found.items()}


def byte_sums(b: Any, size: Size, codes: Load, xs: Load, sums: Sequence[Any]) -> Sums:
    """Sums of byte * x, both signed; as `nibble_sums`."""
    if VNNI:
        begin = [b.mul(total, filled(INTS, -_SIGN)) for total in sums]
        return _vnni_sums(b, size, lambda *at: b.xor(codes(*at), filled(BYTES, _SIGN)), xs, begin)
    if not _SIGNS:
        return _plain_sums(b, size, codes, xs, signed=True)
    totals: Sums = {}
    for step in range(size.steps):
        columns = [codes(step, part) for part in range(size.parts)]
        magnitudes = [
            _call(b, f"llvm.abs.v{BYTES.count}i8", BYTES, code, ir.Constant(ir.IntType(1), 0))
            for code in columns
        ]
        for r in range(size.rows):
            x = xs(step, r)
            for part, (code, magnitude) in enumerate(zip(columns, magnitudes, strict=True)):
                signed = _call(b, "llvm.x86.avx2.psign.b", BYTES, x, code)
                _add(b, totals, (r, part), _pairs(b, _products(b, magnitude, signed)))
        _end_step(b)
    return totals


def _add(b: Any, totals: Sums, cell: tuple[int, int], value: Any) -> None:
    totals[cell] = b.add(totals[cell], value) if cell in totals else value


def keep_in_memory(b: Any, places: Sequence[Any]) -> None:
    """Keep LLVM from turning these pointers' numbers into registers."""
    for place in places:
        b.asm(ir.FunctionType(ir.VoidType(), [place.type]), "", "r,~{memory}", [place], side_effect=True)


def _end_step(b: Any) -> None:
    """Keep LLVM from moving loads across this: it would load all steps first, more than registers hold."""
    b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)


def _vnni_sums(b: Any, size: Size, codes: Load, xs: Load, begin: Sequence[Any]) -> Sums:
    totals = {(r, part): begin[r] for r in range(size.rows) for part in range(size.parts)}
    for step in range(size.steps):
        columns = [codes(step, part) for part in range(size.parts)]
        for r in range(size.rows):
            x = b.bitcast(xs(step, r), INTS)
            for part, code in enumerate(columns):
                values = totals[r, part], b.bitcast(code, INTS), x
                totals[r, part] = _call(b, f"llvm.x86.avx512.vpdpbusd.{_BITS}", INTS, *values)
        _end_step(b)
    return totals


def _products(b: Any, unsigned: Any, signed: Any) -> Any:
    """Sums of two products, in 16 bits."""
    name = "llvm.x86.avx2.pmadd.ub.sw" if VECTOR == 8 else "llvm.x86.avx512.pmaddubs.w.512"
    return _call(b, name, _SHORTS, unsigned, signed)


def _pairs(b: Any, shorts: Any) -> Any:
    """Sums of two neighbours, in 32 bits."""
    name = "llvm.x86.avx2.pmadd.wd" if VECTOR == 8 else "llvm.x86.avx512.pmaddw.d.512"
    return _call(b, name, INTS, shorts, filled(_SHORTS, 1))


def _short_sums(b: Any, size: Size, codes: Load, xs: Load) -> Sums:
    assert size.steps <= _SUMS_IN_SHORTS
    totals: Sums = {}
    for step in range(size.steps):
        columns = [codes(step, part) for part in range(size.parts)]
        for r in range(size.rows):
            x = xs(step, r)
            for part, code in enumerate(columns):
                _add(b, totals, (r, part), _products(b, code, x))
        _end_step(b)
    return {cell: _pairs(b, total) for cell, total in totals.items()}


def _plain_sums(b: Any, size: Size, codes: Load, xs: Load, *, signed: bool) -> Sums:
    totals: Sums = {}
    for step in range(size.steps):
        columns = [codes(step, part) for part in range(size.parts)]
        wide = [b.sext(code, _WIDE) if signed else b.zext(code, _WIDE) for code in columns]
        for r in range(size.rows):
            x = b.sext(xs(step, r), _WIDE)
            for part, code in enumerate(wide):
                products = b.mul(code, x)
                for first in range(STEP):
                    places = ir.Constant(INTS, [STEP * i + first for i in range(VECTOR)])
                    _add(b, totals, (r, part), b.shuffle_vector(products, products, places))
    return totals
