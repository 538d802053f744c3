"""Records: what Python hands to a kernel, declared once and known to both by the names of its fields.

A declaration is a NamedTuple class. `words_of` writes a record as int64 words, `reader` makes the function
that kernels read it back with. Both follow the declaration, so that no code counts offsets. A field is of one
of these types:

    int, Address    one word
    bool            one word, 0 or 1
    float           one word, whose lower half is the bits of an fp32; kernels read a float32
    a record        its words, in place
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from operator import index
from typing import Any, NewType, TypeVar, cast, get_type_hints

import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

Address = NewType("Address", int)
"""Where an array begins in memory. The code that writes it into a record keeps a reference to the array."""

Record = tuple[Any, ...]
"""An instance of a declaration."""

R = TypeVar("R", bound=Record)
Kind = type[Record]

WORD_BYTES = 8
_I64 = ir.IntType(64)


def address_of(values: torch.Tensor | NDArray[Any]) -> Address:
    """The address of an array's first element."""
    return Address(values.data_ptr() if isinstance(values, torch.Tensor) else values.ctypes.data)


def words_of(record: Record) -> list[int]:
    """The record as int64 words. Raises TypeError where a value is not of its field's type."""
    words: list[int] = []
    for value, hint in zip(record, _fields(type(record)).values(), strict=True):
        if hint is int or hint is bool:
            words.append(index(value))
        elif hint is float:
            words.append(struct.unpack("<i", struct.pack("<f", value))[0])
        elif type(value) is hint:
            words += words_of(cast(Record, value))
        else:
            raise TypeError(f"{value!r} is no {hint.__name__}")
    return words


@cache
def size_of(kind: Kind) -> int:
    """How many words a record takes."""
    return sum(size_of(hint) if _is_record(hint) else 1 for hint in _fields(kind).values())


@cache
def words_of_field(kind: Kind, field: str) -> range:
    """Which of a record's words are one field's. Raises KeyError for a field that is not declared."""
    first = 0
    for name, hint in _fields(kind).items():
        size = size_of(hint) if _is_record(hint) else 1
        if name == field:
            return range(first, first + size)
        first += size
    raise KeyError(f"{kind.__name__} has no field {field!r}")


def reader(kind: type[R]) -> Callable[[int], R]:
    """A function for kernels: from the address of a record's words to the record."""

    def read(_typing_context, address):  # type: ignore[no-untyped-def]
        def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
            return _load(context, b, kind, args[0])

        return _numba_type(kind)(types.int64), codegen

    return cast(Callable[[int], R], intrinsic(read))


def _load(context: Any, b: Any, kind: Kind, address: Any) -> Any:
    values = []
    for name, hint in _fields(kind).items():
        at = b.add(address, ir.Constant(_I64, WORD_BYTES * words_of_field(kind, name).start))
        if _is_record(hint):
            values.append(_load(context, b, hint, at))
            continue
        word = b.load(b.inttoptr(at, _I64.as_pointer()))
        if hint is bool:
            word = b.icmp_signed("!=", word, ir.Constant(_I64, 0))
        elif hint is float:
            word = b.bitcast(b.trunc(word, ir.IntType(32)), ir.FloatType())
        values.append(word)
    return context.make_tuple(b, _numba_type(kind), values)


def _numba_type(kind: Kind) -> types.BaseTuple:
    scalars = {int: types.int64, bool: types.boolean, float: types.float32}
    members = [scalars.get(hint) or _numba_type(hint) for hint in _fields(kind).values()]
    made: types.BaseTuple = types.BaseTuple.from_types(members, kind)  # type: ignore[no-untyped-call]
    return made


@cache
def _fields(kind: Kind) -> dict[str, type]:
    """Names and types of a declaration's fields: int, bool, float or a declaration. Raises TypeError."""
    hints = get_type_hints(kind)
    fields = {}
    for name in kind._fields:  # type: ignore[attr-defined]
        hint = hints[name]
        hint = getattr(hint, "__supertype__", hint)  # an Address is an int
        if hint not in (int, bool, float) and not _is_record(hint):
            raise TypeError(f"{kind.__name__}.{name}: {hint} is no type of a record's field")
        fields[name] = hint
    return fields


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")
