"""What output must match, from Python arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidRequest
from paceline.fields import refuse, set_field
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.schemas import json_schema

GRAMMARS = frozenset({"schema", "regex", "choices", "grammar", "structural_tag"})
"""Options of a request of which one at most may be given."""


def set_grammar(request: pb.GenerateRequest, name: str, value: Any) -> None:
    """Set the grammar of a request from one of the options. Raises InvalidRequest, TypeError."""
    if request.HasField("grammar"):
        raise InvalidRequest(f"{name}: only one of {', '.join(sorted(GRAMMARS))}")
    if name == "choices":
        request.grammar.choices.SetInParent()
        set_field(request.grammar.choices, "choices", value, name)
        return
    field = {"schema": "json_schema", "grammar": "lark"}.get(name, name)
    if name in ("schema", "structural_tag"):
        value = _text(name, value)
    set_field(request.grammar, field, value, name)


def _text(name: str, value: Any) -> str:
    if name == "structural_tag" and not isinstance(value, str | Mapping):
        refuse(name, "a mapping or JSON", value)
    try:
        if name == "schema":
            return json_schema(value)
        return value if isinstance(value, str) else json.dumps(value, allow_nan=False)
    except ValueError as error:  # circular, or no JSON
        raise InvalidRequest(f"{name}: {error}") from None
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
