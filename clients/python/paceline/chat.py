"""Turns of a chat, and the tools that a model may call in it. Frozen dataclasses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from paceline.errors import InvalidOutput


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat. Control tokens of the model that occur in it are treated as plain text."""

    role: str  # system, user, assistant, tool, or another role of the model's chat template
    content: str = ""
    name: str = ""  # the speaker's name, for templates that use it
    tool_calls: Sequence[ToolCall] = ()  # an assistant's
    tool_call_id: str = ""  # of a tool's answer: the call that it answers
    reasoning: str = ""  # an assistant's, of before this answer; needs a template that reads it


NO_PARAMETERS = '{"type": "object", "properties": {}, "additionalProperties": false}'


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema of an object, its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | str = NO_PARAMETERS  # a string is JSON
    strict: bool = False  # arguments of its calls match the schema, demanded or not


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools the model may or must call. `mode`: auto, none, required; "": required with a `name`."""

    mode: str = ""
    name: str = ""  # this tool, and no other
    max_calls: int = 0  # at most this many calls in an answer; 0: any number
    names: Sequence[str] = ()  # these tools alone, though the prompt shows all


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for. `arguments` is JSON as the model wrote it."""

    id: str
    name: str  # of the tool
    arguments: str

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments by name. Raises InvalidOutput if they are no JSON object, as those of a call that
        max_tokens cut off. They match the tool's schema if it is strict, or `tool_choice` demanded a call.
        """
        try:
            value = json.loads(self.arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidOutput(f"the arguments of {self.name!r} are incomplete: {error}") from error
        if not isinstance(value, dict):
            raise InvalidOutput(f"the arguments of {self.name!r} are no JSON object")
        return value

    def answer(self, result: object) -> Message:
        """The turn that gives the tool's result to the model: text as it is, anything else as JSON.

        Raises TypeError for what JSON can't hold.
        """
        content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        return Message("tool", content, self.name, tool_call_id=self.id)


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """New text of a tool call. The first delta of a call has its id and name, and no later one has."""

    index: int  # of the call in its completion
    id: str
    name: str
    arguments: str  # never retracted; joined they are JSON


MessageLike: TypeAlias = Message | Mapping[str, Any]
"""A Message, or a mapping with its fields. Tool calls may have the form of OpenAI's API."""

ToolLike: TypeAlias = Tool | Mapping[str, Any] | Callable[..., Any]
"""A Tool, a mapping with its fields or in the form of OpenAI's API, or a function or pydantic model."""
