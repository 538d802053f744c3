"""Items of /v1/responses: messages, calls, their results and reasoning, in and out."""

from __future__ import annotations

import uuid
from typing import Any

from paceline import ToolCall, ToolCallDelta, ToolChoice

from paceline_openai import messages
from paceline_openai.fields import array, mapping, one_of, only, text, unsupported
from paceline_openai.refusals import bad

_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def items(value: Any, name: str) -> list[dict[str, Any]]:
    """The turns of a conversation, in the SDK's form: a text is a user's. Raises Refusal, by the item."""
    if isinstance(value, str):
        return [{"role": "user", "content": text(value, name)}]
    turns: list[dict[str, Any]] = []
    for index, one in enumerate(array(value, name)):
        _add(turns, mapping(one, f"{name}[{index}]"), f"{name}[{index}]")
    if not turns:
        raise bad(name, f"{name}: expected at least one item")
    return turns


def with_instructions(turns: list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The turns after a system message."""
    return turns if not instructions else [{"role": "system", "content": instructions}, *turns]


def _add(turns: list[dict[str, Any]], given: dict[str, Any], place: str) -> None:
    """Add an item. Reasoning and calls that follow an assistant's turn are a part of it."""
    kind = given.get("type", "message")
    if kind == "message":
        only(given, place, "type", "role", "content", "id", "status", "phase")
        role = one_of("user", "assistant", "system", "developer")(given.get("role"), f"{place}.role")
        content = messages.content(given.get("content"), f"{place}.content", _PARTS)
        if role == "assistant":
            turn = _assistants(turns, "content", "tool_calls")
            turn["content"] = content
        else:
            turns.append({"role": "system" if role == "developer" else role, "content": content})
    elif kind == "reasoning":
        only(given, place, "type", "id", "status", "content", "summary", "encrypted_content")
        parts = given.get("content") or given.get("summary") or []
        found = "".join(
            text(mapping(one, f"{place}.content").get("text"), f"{place}.content[{index}].text")
            for index, one in enumerate(array(parts, f"{place}.content"))
        )
        if found:
            _assistants(turns, "content", "tool_calls", "reasoning")["reasoning"] = found
    elif kind == "function_call":
        only(given, place, "type", "id", "status", "call_id", "name", "arguments")
        call = {
            "id": text(given.get("call_id"), f"{place}.call_id"),
            "name": text(given.get("name"), f"{place}.name"),
            "arguments": text(given.get("arguments"), f"{place}.arguments"),
        }
        _assistants(turns).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        only(given, place, "type", "id", "status", "call_id", "output")
        content = messages.content(given.get("output"), f"{place}.output", _PARTS)
        turns.append({"role": "tool", "tool_call_id": text(given.get("call_id"), f"{place}.call_id"),
                      "content": content})  # fmt: skip
    else:
        raise unsupported(f"{place}.type", kind, "items are messages, functions' calls, results, reasoning")


def _assistants(turns: list[dict[str, Any]], *unless: str) -> dict[str, Any]:
    """The last turn if it is the assistant's and has none of these fields; else a new one of its."""
    if not turns or turns[-1]["role"] != "assistant" or any(name in turns[-1] for name in unless):
        turns.append({"role": "assistant"})
    return turns[-1]


def tools(value: Any, name: str) -> list[dict[str, Any]]:
    """Functions: those of chats, without the inner object."""
    found = []
    for index, one in enumerate(array(value, name)):
        given = messages.of_function(one, f"{name}[{index}]")
        inner = {key: inner for key, inner in given.items() if key != "type"}
        found.append(messages.tool(inner, f"{name}[{index}]"))
    return found


def tool_choice(value: Any, name: str) -> ToolChoice:
    """auto, none, required; a function by name; or several (`allowed_tools`)."""
    if not isinstance(value, dict):
        return messages.tool_choice(value, name)
    if value.get("type") == "allowed_tools":
        return messages.allowed_tools(value, name, _chosen, "type")
    return ToolChoice("required", name=_chosen(value, name))


def _chosen(value: Any, place: str) -> str:
    given = messages.of_function(value, place)
    only(given, place, "type", "name")
    return text(given.get("name"), f"{place}.name")


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def message_item() -> dict[str, Any]:
    """An empty message of the assistant."""
    return {"id": _id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}


def reasoning_item() -> dict[str, Any]:
    """Empty reasoning."""
    return {"id": _id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}


def call_item(name: str, call_id: str) -> dict[str, Any]:
    """A call without arguments."""
    return {"id": _id("fc"), "type": "function_call", "status": "in_progress", "name": name,
            "call_id": call_id, "arguments": ""}  # fmt: skip


def whole_call(index: int, call: ToolCall) -> ToolCallDelta:
    """A call as the only delta of itself."""
    return ToolCallDelta(index, call.id, call.name, call.arguments)
