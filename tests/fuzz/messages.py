"""Random protobuf messages from their descriptors, biased towards the values that break servers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTEGERS = [
    0,
    1,
    2,
    3,
    7,
    15,
    16,
    17,
    63,
    64,
    127,
    128,
    129,
    255,
    256,
    257,
    1000,
    49_151,
    49_152,
    65_536,
    10**6,
]
INTEGERS += [10**9, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
FLOATS = [0.0, -0.0, 1.0, 0.5, -1.0, 1e-45, 1e-8, 0.999999, 1.000001, 100.0, 101.0, 1e30, -1e30]
FLOATS += [math.nan, math.inf, -math.inf]
TEXTS = [
    "",
    " ",
    "a",
    "hello world",
    "\x00",
    "\ufffd",
    "é",
    "🚴",
    "a" * 129,
    "{{ 1/0 }}",
    "user",
    "system",
    "b" * 5000,
]

_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def integer(rng: random.Random, low: int, high: int) -> int:
    """Mostly small, often on an edge, always in the field's range."""
    if rng.random() < 0.5:
        return rng.randrange(0, 300)
    value = rng.choice(INTEGERS)
    if low < 0 and rng.random() < 0.3:
        value = -value
    return min(max(value, low), high)


def _scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind in _BITS:
        return integer(rng, *_BITS[kind])
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS) if rng.random() < 0.7 else rng.uniform(-3, 3)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice([0, 1, 2, 3, 4, 99, -1])
    text = rng.choice(TEXTS)
    return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text


def _size(rng: random.Random) -> int:
    return rng.choice([0, 1, 1, 2, 3, 5, 8, 20]) if rng.random() < 0.97 else rng.choice([130, 1000, 10_000])


def _replace(rng: random.Random, message: Message, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        entries = getattr(message, field.name)
        for _ in range(min(_size(rng), 1000 if value.message_type is None else 200 >> min(depth, 4))):
            if value.message_type is None:
                entries[_scalar(rng, key)] = _scalar(rng, value)
            else:
                disturb(rng, entries[_scalar(rng, key)], 0.65, depth + 1)
    elif field.is_repeated and field.message_type is not None:
        for _ in range(min(_size(rng), 200 >> min(depth, 4))):
            disturb(rng, getattr(message, field.name).add(), 0.65, depth + 1)
    elif field.is_repeated:
        getattr(message, field.name).extend(_scalar(rng, field) for _ in range(_size(rng)))
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
        disturb(rng, getattr(message, field.name), 0.65, depth + 1)
    else:
        setattr(message, field.name, _scalar(rng, field))


def disturb(rng: random.Random, message: Message, rate: float, depth: int = 0) -> None:
    """Overwrite or extend each field with probability `rate`, in nested messages too.

    A high rate on an empty message makes nonsense; a low one on a valid message makes requests that
    pass the first checks and fail, or should fail, deep inside.
    """
    fields: Sequence[Any] = message.DESCRIPTOR.fields
    for field in fields:
        if rng.random() < rate and depth < 6:
            _replace(rng, message, field, depth)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            if field.is_repeated:
                for item in getattr(message, field.name):
                    disturb(rng, item, rate, depth + 1)
            elif message.HasField(field.name):
                disturb(rng, getattr(message, field.name), rate, depth + 1)
