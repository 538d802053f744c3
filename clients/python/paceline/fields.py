"""Assigns Python values to fields of protobuf messages, with errors that name the argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidRequest


def set_field(message: Any, field: str, value: Any, name: str) -> None:
    """Assign a scalar, a sequence or a mapping to a field of `message`.

    Raises InvalidRequest for a value that the field's protobuf type can't hold, TypeError for a wrong
    Python type; both begin with `name`.
    """
    repeated = message.DESCRIPTOR.fields_by_name[field].is_repeated
    if repeated and isinstance(value, str):
        raise TypeError(f"{name} must be a sequence, not a string")
    try:
        if isinstance(value, Mapping):
            getattr(message, field).update(value)
        elif repeated:
            getattr(message, field).extend(value)
        else:
            setattr(message, field, value)
    except (ValueError, OverflowError) as error:  # outside the integer's range, or a lone surrogate
        raise InvalidRequest(f"{name}: {error}") from None
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
