"""Tools of a request: `SentTool` as they came, `OfferedTool` with its schema; `CallRules` of the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler_service.chat.json_object import parse_object

_ANY_OBJECT = '{"type": "object"}'
_NO_PARAMETERS = {"type": "object", "properties": {}}


class SentTool(NamedTuple):
    """A function of the client. `parameters` is JSON that nobody has parsed yet."""

    name: str
    description: str
    parameters: str

    def parsed(self) -> OfferedTool:
        """The tool with its schema. Raises ValueError if the parameters are no JSON schema of an object."""
        parameters = parse_object(self.parameters) or _NO_PARAMETERS
        if parameters.get("type", "object") != "object":
            raise ValueError("must be the JSON schema of an object")
        return OfferedTool(self.name, self.description, parameters)


@dataclass(frozen=True, slots=True)
class CallRules:
    """Which calls an output may have. Tools are indices into those of the request."""

    tools: tuple[int, ...]
    """Those that may be called; not empty."""
    demanded: bool
    """The output is calls, at least one; else it is text, with or without calls in it."""
    max_calls: int = 0
    """0: any number."""
    strict: frozenset[int] = frozenset()
    """Tools whose arguments match their schemas, where calls are not demanded (then all do)."""

    def bound(self, tools: Sequence[SentTool]) -> list[tuple[int, SentTool]]:
        """Those of the request's `tools` that may be called, with their indices.

        One whose arguments may be any object has that as its schema.
        """
        matching = frozenset(self.tools) if self.demanded else self.strict
        return [
            (index, tools[index] if index in matching else tools[index]._replace(parameters=_ANY_OBJECT))
            for index in self.tools
        ]


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function of the client. `parameters` is a JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, object]

    def for_template(self) -> dict[str, object]:
        """As chat templates read it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}
