"""Types that people have in pydantic models and OpenAPI documents, as JSON schemas, by name."""

from __future__ import annotations

import enum
import ipaddress
import pathlib
import re
import uuid
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field


class Color(enum.Enum):
    """Two values."""

    RED = "red"
    BLUE = "blue"


PYTHON: dict[str, Any] = {
    "SecretStr": pydantic.SecretStr,
    "Path": pathlib.Path,
    "UUID": uuid.UUID,
    "UUID1": pydantic.UUID1,
    "UUID4": pydantic.UUID4,
    "bytes": bytes,
    "Base64": pydantic.Base64Bytes,
    "IPv4Address": ipaddress.IPv4Address,
    "IPvAnyAddress": pydantic.IPvAnyAddress,
    "Pattern": re.Pattern,
    "set": set[int],
    "frozenset": frozenset[str],
    "datetime": datetime,
    "date": date,
    "time": time,
    "timedelta": timedelta,
    "Decimal": Decimal,
    "Url": pydantic.AnyUrl,
    "PositiveInt": pydantic.PositiveInt,
    "confloat": Annotated[float, Field(ge=0, le=1)],
    "conlist": Annotated[list[int], Field(min_length=1, max_length=3)],
    "Json": pydantic.Json,
    "Enum": Color,
    "Literal": Literal["a", 1],
    "Optional": int | None,
    "tuple": tuple[int, str],
    "variadic tuple": tuple[int, ...],
    "dict with str keys": dict[str, int],
    "dict with int keys": dict[int, str],
    "Any": Any,
    "a union of int and str": int | str,
}
OPENAPI: dict[str, Any] = {
    "int32": {"type": "integer", "format": "int32"},
    "int64": {"type": "integer", "format": "int64"},
    "double": {"type": "number", "format": "double"},
    "password": {"type": "string", "format": "password"},
    "byte": {"type": "string", "format": "byte"},
    "binary": {"type": "string", "format": "binary"},
    "examples and default": {"type": "integer", "examples": [1, 2], "default": 1, "maximum": 99},
    "x-extensions": {"type": "boolean", "x-internal": True, "x-order": {"format": "none", "rank": 1}},
    "discriminator": {
        "oneOf": [{"$ref": "#/components/schemas/Cat"}, {"$ref": "#/components/schemas/Dog"}],
        "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/components/schemas/Cat"}},
        "components": {
            "schemas": {
                name: {
                    "type": "object",
                    "properties": {"kind": {"const": name.lower()}, **rest},
                    "required": ["kind"],
                    "additionalProperties": False,
                }
                for name, rest in {"Cat": {"lives": {"type": "integer"}}, "Dog": {}}.items()
            }
        },
    },
    "nullable": {"type": ["boolean", "null"], "nullable": True},
    "contentEncoding": {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"},
    "additionalProperties: true": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": True,
    },
}


def type_schemas() -> dict[str, Any]:
    """All of them: 43."""
    adapters = {name: pydantic.TypeAdapter(type_) for name, type_ in PYTHON.items()}
    return {name: adapter.json_schema() for name, adapter in adapters.items()} | OPENAPI
