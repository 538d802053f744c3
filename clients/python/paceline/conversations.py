"""Protobuf chats from Python arguments: messages, tools, and options that go with messages. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from paceline.chat import NO_PARAMETERS, Message, MessageLike, Tool, ToolCall, ToolChoice, ToolLike
from paceline.errors import InvalidRequest
from paceline.fields import refuse, set_field
from paceline.functions import tool_of
from paceline.scheduler.v1 import scheduler_pb2 as pb

CHAT_OPTIONS = frozenset(
    {"tools", "tool_choice", "template_arguments", "continue_final_message", "omit_opening"}
)
"""Options of a request with messages."""

_CHOICES = {
    "auto": pb.TOOL_CHOICE_MODE_AUTO,
    "none": pb.TOOL_CHOICE_MODE_NONE,
    "required": pb.TOOL_CHOICE_MODE_REQUIRED,
}


def chat_messages(messages: Sequence[MessageLike], name: str = "messages") -> pb.Messages:
    """Messages for Generate, Tokenize and Score. `name` is the argument's, for errors.

    Raises InvalidRequest, naming the message's index and field; TypeError for a wrong type.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        refuse(name, "a sequence of messages", messages)
    wire = pb.Messages()
    for index, message in enumerate(messages):
        _set_message(wire.messages.add(), message, f"{name}[{index}]")
    return wire


def set_chat_option(chat: pb.Messages, name: str, value: Any) -> None:
    """Set one of CHAT_OPTIONS. Raises InvalidRequest, TypeError."""
    if name in ("continue_final_message", "omit_opening"):
        set_field(chat, name, value, name)
    elif name == "tools":
        if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
            refuse("tools", "a sequence of tools", value)
        for index, tool in enumerate(value):
            _set_tool(chat.tools.add(), tool, f"tools[{index}]")
    elif name == "tool_choice":
        _set_tool_choice(chat.tool_choice, value)
    else:
        if not isinstance(value, Mapping):
            refuse(name, "a mapping", value)
        try:
            chat.template_arguments.update(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidRequest(f"template_arguments: {error}") from None


def _set_message(wire: pb.Message, message: MessageLike, name: str) -> None:
    given = _fields(message, Message, name)
    needed = ["role"] if given.get("tool_calls") else ["role", "content"]
    for field in needed:
        if field not in given:
            raise InvalidRequest(f"{name} has no {field!r}, or an empty one")
    for field, value in given.items():
        if field != "tool_calls":
            set_field(wire, field, value, f"{name}.{field}")
    calls = given.get("tool_calls", ())
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Iterable):
        refuse(f"{name}.tool_calls", "a sequence of calls", calls)
    for index, call in enumerate(calls):
        place = f"{name}.tool_calls[{index}]"
        values = _fields(call, ToolCall, place)
        if isinstance(values.get("arguments"), Mapping):
            values["arguments"] = json.dumps(values["arguments"], ensure_ascii=False)
        entry = wire.tool_calls.add()
        for field, value in values.items():
            set_field(entry, field, value, f"{place}.{field}")


def _set_tool(wire: pb.Tool, tool: ToolLike, name: str) -> None:
    if callable(tool):
        try:
            tool = tool_of(tool)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from error
    given = _fields(tool, Tool, name)
    if not given.get("name"):
        raise InvalidRequest(f"{name} has no 'name'")
    if not isinstance(given.setdefault("parameters", NO_PARAMETERS), str):
        given["parameters"] = _json(given["parameters"], f"{name}.parameters")
    for field, value in given.items():
        set_field(wire, field, value, f"{name}.{field}")


def _set_tool_choice(wire: pb.ToolChoice, choice: Any) -> None:
    """A mode, the name of a tool, a ToolChoice or its fields, or OpenAI's object that names a tool."""
    if isinstance(choice, str):
        choice = {"mode" if choice in _CHOICES else "name": choice}
    if not isinstance(choice, ToolChoice | Mapping) or choice == {"name": ""}:
        raise InvalidRequest(f"tool_choice: expected {', '.join(_CHOICES)} or a tool's name, got {choice!r}")
    given = _fields(choice, ToolChoice, "tool_choice")
    mode = given.pop("mode", "required" if given.get("name") else "auto")
    if mode not in _CHOICES:
        raise InvalidRequest(f"tool_choice.mode: expected {', '.join(_CHOICES)}, got {mode!r}")
    wire.mode = _CHOICES[mode]
    for field, value in given.items():
        set_field(wire, field, value, f"tool_choice.{field}")


def _fields(given: Any, kind: type, name: str) -> dict[str, Any]:
    """The fields of a dataclass or of a mapping, without those that are None.

    A mapping {"type": "function", "function": {...}, ...}, as OpenAI's API has it, is made flat. Raises
    InvalidRequest for a field that the dataclass lacks, TypeError for anything else.
    """
    names = {field.name for field in fields(kind)}
    if isinstance(given, kind):
        return {field: value for field in names if (value := getattr(given, field))}
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a {kind.__name__} or a mapping, got {type(given).__name__}")
    flat = dict(given)
    if isinstance(flat.get("function"), Mapping) and flat.pop("type", "function") == "function":
        flat |= flat.pop("function")
    flat = {field: value for field, value in flat.items() if value is not None}
    if unknown := flat.keys() - names:
        raise InvalidRequest(f"{name} has an unknown field {min(map(str, unknown))!r}")
    return flat


def _json(value: Any, name: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: {error}") from None
