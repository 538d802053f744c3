"""What output must match, from Python arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline.errors import InvalidRequest
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.schemas import json_schema

GRAMMARS = frozenset({"schema", "regex", "choices", "grammar", "structural_tag"})
"""Options of a request of which one at most may be given."""


def set_grammar(request: pb.GenerateRequest, name: str, value: Any) -> None:
    """Set the grammar of a request from one of the options. Raises InvalidRequest, TypeError."""
    if request.HasField("grammar"):
        raise InvalidRequest(f"{name}: only one of {', '.join(sorted(GRAMMARS))}")
    try:
        if name == "schema":
            request.grammar.json_schema = json_schema(value)
        elif name == "choices":
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise TypeError("must be a sequence of strings")
            request.grammar.choices.SetInParent()
            request.grammar.choices.choices.extend(value)
        elif name == "structural_tag":
            request.grammar.structural_tag = value if isinstance(value, str) else json.dumps(value)
        else:
            setattr(request.grammar, "lark" if name == "grammar" else name, value)
    except ValueError as error:  # a lone surrogate, or no JSON
        raise InvalidRequest(f"{name}: {error}") from None
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
