"""Assigns Python values to fields of protobuf messages, with errors that name the argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from google.protobuf.descriptor import FieldDescriptor

from paceline.errors import InvalidRequest

_KINDS = {
    FieldDescriptor.CPPTYPE_STRING: ("a string", "strings"),
    FieldDescriptor.CPPTYPE_BOOL: ("a bool", "bools"),
    FieldDescriptor.CPPTYPE_FLOAT: ("a number", "numbers"),
}

_MOST = {FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1, FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1}
"""The largest numbers of unsigned fields."""


def set_field(message: Any, field: str, value: Any, name: str) -> None:
    """Assign a scalar, a sequence or a mapping to a field of `message`.

    Raises InvalidRequest for a value that the field's protobuf type can't hold, TypeError for a wrong
    Python type; both begin with `name`.
    """
    described = message.DESCRIPTOR.fields_by_name[field]
    one, several = _KINDS.get(described.cpp_type, ("an integer", "integers"))
    is_map = described.message_type is not None
    wanted = f"a sequence of {several}"
    if is_map:  # of token ids to numbers, or of names to texts
        key = described.message_type.fields_by_name["key"].cpp_type
        of_texts = key == FieldDescriptor.CPPTYPE_STRING
        wanted = "a mapping of strings to strings" if of_texts else "a mapping of integers to numbers"
    if not described.is_repeated:
        wanted = one
    if isinstance(value, bytes) or (described.is_repeated and isinstance(value, str)):
        refuse(name, wanted, value)
    if is_map and not isinstance(value, Mapping):
        refuse(name, wanted, value)
    try:
        if is_map:
            getattr(message, field).update(value)
        elif described.is_repeated:
            getattr(message, field).extend(value)
        else:
            setattr(message, field, value)
    except (ValueError, OverflowError) as error:  # outside the integer's range, or a lone surrogate
        most = _MOST.get(described.cpp_type)
        why = f"must be within [0, {most}], not {value}" if most and isinstance(value, int) else error
        raise InvalidRequest(f"{name}: {why}") from None
    except TypeError:
        refuse(name, wanted, value)


def refuse(name: str, wanted: str, value: object) -> NoReturn:
    """Raises TypeError: this argument is none of what is wanted."""
    got = type(value).__name__
    if isinstance(value, list | tuple):
        inner = sorted({type(item).__name__ for item in value})[:4]
        got = f"{got} of {', '.join(inner)}" if inner else got
    raise TypeError(f"{name} must be {wanted}, got {got}")
