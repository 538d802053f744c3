"""Tools that the model may call: `SentTool` as a request has it, `OfferedTool` with its schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from scheduler_service.chat.json_object import parse_object

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
