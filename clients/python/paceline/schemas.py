"""JSON schemas that output must match, and the values that such output is.

pydantic is no dependency: its models and adapters are known by their methods.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from paceline.errors import InvalidOutput

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Parsed = TypeVar("Parsed", default=Any)
else:  # a default is for checkers alone: without a schema, `Completion.parsed` is Any
    from typing import TypeVar

    Parsed = TypeVar("Parsed")
_Valid = TypeVar("_Valid", covariant=True)


class SchemaAdapter(Protocol[_Valid]):
    """The methods used of a `pydantic.TypeAdapter`."""

    def json_schema(self) -> dict[str, Any]: ...  # noqa: D102
    def validate_json(self, data: str, /) -> _Valid: ...  # noqa: D102


SchemaLike: TypeAlias = Mapping[str, Any] | str | type[Parsed] | SchemaAdapter[Parsed]
"""A JSON schema as a mapping or as JSON, a pydantic model, or a `pydantic.TypeAdapter`."""
AnySchema: TypeAlias = SchemaLike[Any]


def json_schema(schema: AnySchema) -> str:
    """The schema as JSON. A text is returned as it is: the server checks it.

    A pydantic model ignores unknown properties; the schema that pydantic generates allows them. Here it is
    closed, so that no tokens are spent on properties that are dropped.

    Raises TypeError if it is no schema or has values that JSON lacks, ValueError if it contains itself, NaN
    or infinity.
    """
    if isinstance(schema, str):
        return schema
    if isinstance(schema, Mapping):
        return json.dumps(schema, allow_nan=False)
    for method in ("model_json_schema", "json_schema"):
        if callable(generate := getattr(schema, method, None)):
            return json.dumps(_closed(generate()), allow_nan=False)
    raise TypeError(f"expected a mapping, JSON or a pydantic model, got {type(schema).__name__}")


def parse(schema: SchemaLike[Parsed], text: str) -> Parsed:
    """The value of a whole text that matches the schema.

    An instance of a pydantic model, else what `json.loads` returns. Raises InvalidOutput; where pydantic
    refuses the text, its ValidationError is the cause.
    """
    for method in ("model_validate_json", "validate_json"):
        if callable(validate := getattr(schema, method, None)):
            break
    else:
        validate = json.loads
    try:
        value: Parsed = validate(text)
    except (ValueError, RecursionError) as error:  # pydantic.ValidationError is a ValueError
        raise InvalidOutput(str(error)) from error
    return value


_MAPS_OF_SCHEMAS = ("properties", "$defs")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties")


def _closed(schema: Any) -> Any:
    """A schema of pydantic's, without what its instances would not keep.

    Objects have no properties but those named, unless the schema says more about them. `uniqueItems`, which
    sets have and grammars can't express, goes: a set takes repeated items.
    """
    if not isinstance(schema, Mapping):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS_OF_SCHEMAS and isinstance(value, Mapping):
            closed[key] = {name: _closed(one) for name, one in value.items()}
        elif key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            closed[key] = [_closed(one) for one in value]
        elif key in _SCHEMAS:
            closed[key] = _closed(value)
        elif key != "uniqueItems":
            closed[key] = value
    if "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed
