"""Tables of an endpoint's fields: how each is checked, and what it means. Parsing and docs come from them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from service_kit.known import similar

from paceline_openai.refusals import Refusal, bad

Kind: TypeAlias = Callable[[Any, str], Any]
"""kind(value, name) returns the value, checked, or raises Refusal, which names the field."""

_SHOWN = 60  # characters of a value in an error


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a request's body. Without a `kind` it is refused, unless its value is one of `defaults`."""

    name: str
    kind: Kind | None
    note: str  # for docs: what it means; of a refused one, why or what to do instead
    defaults: tuple[Any, ...] = ()
    required: bool = False

    @property
    def state(self) -> str:
        """For docs: done, refused, or the values that are accepted."""
        if self.kind is not None:
            return "done"
        shown = ", ".join(f"`{json.dumps(value)}`" for value in self.defaults)
        return f"{shown} only" if shown else "refused"


class Table:
    """The fields of an endpoint, by name."""

    def __init__(self, *fields: Field) -> None:
        self.fields: Mapping[str, Field] = {field.name: field for field in fields}

    def read(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a request's fields; one that is null is left out, as if it were not there.

        Raises Refusal for an unknown field, one that can't have its effect, and a missing one.
        """
        values = {}
        for name, value in body.items():
            field = self.fields.get(name)
            if field is None:
                text = f"Unrecognized request argument supplied: {name[:80]}{similar(name[:80], self.fields)}"
                raise bad(name[:80], text, "unknown_parameter")
            if value is None:
                continue
            if field.kind is not None:
                values[name] = field.kind(value, name)
            elif not any(type(value) is type(one) and value == one for one in field.defaults):
                raise unsupported(name, value, field.note)
        for field in self.fields.values():
            if field.required and field.name not in values:
                message = f"Missing required parameter: '{field.name}'."
                raise bad(field.name, message, "missing_required_parameter")
        return values


def unsupported(name: str, value: Any, note: str) -> Refusal:
    """The refusal of a value that this gateway can't do justice to."""
    return bad(
        name, f"{name}: {shown(value)} is not supported here{': ' if note else ''}{note}", "unsupported_value"
    )


def shown(value: Any) -> str:
    """The beginning of a value, for errors."""
    text = (
        json.dumps(value)
        if isinstance(value, str | int | float | bool | None)
        else f"a value of type {_type(value)}"
    )
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    return names.get(type(value), "null")


def wrong(name: str, wanted: str, value: Any) -> Refusal:
    """The refusal of a value of another type."""
    message = f"Invalid type for '{name}': expected {wanted}, but got {_type(value)} instead."
    return bad(name, message, "invalid_type")


def boolean(value: Any, name: str) -> bool:
    """A JSON boolean."""
    if not isinstance(value, bool):
        raise wrong(name, "a boolean", value)
    return value


def number(value: Any, name: str) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(name, "a number", value)
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise bad(name, f"{name}: the number is too large")
    return found


def integer(low: int, high: int) -> Kind:
    """An integer within bounds."""

    def read(value: Any, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(name, "an integer", value)
        if not low <= value <= high:
            raise bad(name, f"{name}: expected {low} to {high}, got {shown(value)}")
        return value

    return read


def text(value: Any, name: str) -> str:
    """A string that UTF-8 can hold."""
    if not isinstance(value, str):
        raise wrong(name, "a string", value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise bad(name, f"{name}: has half of a surrogate pair, which is no character") from None
    return value


def texts(value: Any, name: str) -> list[str]:
    """A string, or an array of strings."""
    if isinstance(value, str):
        return [text(value, name)]
    if not isinstance(value, list):
        raise wrong(name, "a string or an array of strings", value)
    return [text(one, f"{name}[{index}]") for index, one in enumerate(value)]


TOKEN = integer(0, (1 << 32) - 1)


def tokens(value: Any, name: str) -> list[int]:
    """An array of token ids."""
    if not isinstance(value, list):
        raise wrong(name, "an array of token ids", value)
    if not all(type(one) is int and 0 <= one < 1 << 32 for one in value):
        for index, one in enumerate(value):
            TOKEN(one, f"{name}[{index}]")
    return value


def one_of(*allowed: str) -> Kind:
    """One of these strings."""

    def read(value: Any, name: str) -> str:
        if not isinstance(value, str):
            raise wrong(name, "a string", value)
        if value not in allowed:
            raise bad(name, f"{name}: expected one of {', '.join(allowed)}, got {shown(value)}")
        return value

    return read


def mapping(value: Any, name: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    return value


def array(value: Any, name: str) -> list[Any]:
    """A JSON array."""
    if not isinstance(value, list):
        raise wrong(name, "an array", value)
    return value


def only(value: Mapping[str, Any], name: str, *known: str) -> None:
    """Raises Refusal if an object has a field that is not known and not null."""
    for key, inner in value.items():
        if key not in known and inner is not None:
            where = f"{name}.{key[:80]}"
            raise bad(where, f"{where} is not supported here{similar(key[:80], known)}", "unknown_parameter")
