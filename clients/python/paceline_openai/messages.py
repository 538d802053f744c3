"""Messages and tools of chats, in the SDK's form. What has no place in the prompt is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline import ModelInfo

from paceline_openai.fields import array, boolean, mapping, one_of, only, shown, text, unsupported
from paceline_openai.refusals import bad

_ROLES = ("developer", "system", "user", "assistant", "tool")
_COMMON = ("role", "content", "name")
_OF_ROLE: Mapping[str, tuple[str, ...]] = {
    "assistant": ("tool_calls", "reasoning_content", "reasoning", "refusal"),
    "tool": ("tool_call_id",),
}
_PARTS = {"image_url": "images", "input_audio": "audio", "file": "files", "video_url": "videos"}


def messages(value: Any, name: str) -> list[dict[str, Any]]:
    """The turns of a chat, in the SDK's form. Raises Refusal, which names the message's index and field."""
    given = array(value, name)
    if not given:
        raise bad(name, f"{name}: expected at least one message")
    return [_message(one, f"{name}[{index}]") for index, one in enumerate(given)]


def _message(value: Any, place: str) -> dict[str, Any]:
    given = mapping(value, place)
    role = one_of(*_ROLES)(given.get("role"), f"{place}.role")
    for field, inner in given.items():
        if inner is None or field in _COMMON or field in _OF_ROLE.get(role, ()):
            continue
        if inner == [] and field in ("annotations", "tool_calls"):
            continue  # as OpenAI's SDKs send their own answers back
        raise bad(f"{place}.{field[:80]}", f"{place}.{field[:80]} is not supported here", "unknown_parameter")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    for field in ("name", "tool_call_id"):
        if given.get(field) is not None:
            message[field] = text(given[field], f"{place}.{field}")
    calls = given.get("tool_calls")
    if calls:
        message["tool_calls"] = [
            _call(one, f"{place}.tool_calls[{index}]")
            for index, one in enumerate(array(calls, f"{place}.tool_calls"))
        ]
    content = given.get("content")
    if content is not None:
        message["content"] = _content(content, f"{place}.content")
    elif given.get("refusal") is not None:
        message["content"] = text(given["refusal"], f"{place}.refusal")
    elif not calls:
        message["content"] = "" if role == "assistant" else text(content, f"{place}.content")
    reasoning = given.get("reasoning_content") or given.get("reasoning")
    if reasoning:
        message["reasoning"] = text(reasoning, f"{place}.reasoning_content")
    return message


def _content(value: Any, place: str) -> str:
    """A text, or parts that are texts, joined."""
    if isinstance(value, str):
        return text(value, place)
    pieces = []
    for index, one in enumerate(array(value, place)):
        where = f"{place}[{index}]"
        part = mapping(one, where)
        kind = part.get("type")
        if kind == "text":
            only(part, where, "type", "text")
            pieces.append(text(part.get("text"), f"{where}.text"))
        elif kind == "refusal":
            only(part, where, "type", "refusal")
            pieces.append(text(part.get("refusal"), f"{where}.refusal"))
        elif kind in _PARTS:
            raise unsupported(where, kind, f"{_PARTS[kind]} are no input of this model")
        else:
            raise bad(f"{where}.type", f"{where}.type: expected text, got {shown(kind)}")
    return "".join(pieces)


def _call(value: Any, place: str) -> dict[str, Any]:
    """A call that the model has made: {"id", "type": "function", "function": {"name", "arguments"}}."""
    given = mapping(value, place)
    only(given, place, "id", "type", "function", "index")
    one_of("function")(given.get("type", "function"), f"{place}.type")
    function = mapping(given.get("function"), f"{place}.function")
    only(function, f"{place}.function", "name", "arguments")
    return {
        "id": text(given.get("id", ""), f"{place}.id"),
        "name": text(function.get("name"), f"{place}.function.name"),
        "arguments": text(function.get("arguments", ""), f"{place}.function.arguments"),
    }


def tools(value: Any, name: str) -> list[dict[str, Any]]:
    """Functions that the model may call, in the SDK's form."""
    return [_tool(one, f"{name}[{index}]") for index, one in enumerate(array(value, name))]


def _tool(value: Any, place: str) -> dict[str, Any]:
    given = mapping(value, place)
    kind = given.get("type")
    if kind != "function":
        raise unsupported(f"{place}.type", kind, "the model calls functions alone")
    only(given, place, "type", "function")
    function = mapping(given.get("function"), f"{place}.function")
    only(function, f"{place}.function", "name", "description", "parameters", "strict")
    tool: dict[str, Any] = {"name": text(function.get("name"), f"{place}.function.name")}
    if function.get("description") is not None:
        tool["description"] = text(function["description"], f"{place}.function.description")
    if function.get("parameters") is not None:
        tool["parameters"] = mapping(function["parameters"], f"{place}.function.parameters")
    if function.get("strict") is not None and boolean(function["strict"], f"{place}.function.strict"):
        tool["strict"] = True
    return tool


def tool_choice(value: Any, name: str) -> str | dict[str, Any]:
    """auto, none, required; a function by name; or several (`allowed_tools`), as {"mode", "names"}."""
    if isinstance(value, str):
        return str(one_of("auto", "none", "required")(value, name))
    given = mapping(value, name)
    if given.get("type") == "allowed_tools":
        inner = mapping(given.get("allowed_tools"), f"{name}.allowed_tools")
        only(inner, f"{name}.allowed_tools", "mode", "tools")
        place = f"{name}.allowed_tools.tools"
        names = [
            _chosen(one, f"{place}[{index}]") for index, one in enumerate(array(inner.get("tools"), place))
        ]
        return {
            "mode": one_of("auto", "required")(inner.get("mode"), f"{name}.allowed_tools.mode"),
            "names": names,
        }
    return {"mode": "required", "name": _chosen(given, name)}


def _chosen(value: Any, place: str) -> str:
    given = mapping(value, place)
    if given.get("type") != "function":
        raise unsupported(f"{place}.type", given.get("type"), "the model calls functions alone")
    only(given, place, "type", "function")
    return str(
        text(mapping(given.get("function"), f"{place}.function").get("name"), f"{place}.function.name")
    )


def tool_options(values: Mapping[str, Any], info: ModelInfo) -> dict[str, Any]:
    """The SDK's options of `tools`, `tool_choice` and `parallel_tool_calls`. Raises Refusal."""
    given = values.get("tools")
    choice = values.get("tool_choice")
    if not given:
        if choice not in (None, "auto", "none"):
            raise bad("tool_choice", "tool_choice: there are no tools to choose from")
        return {}
    if "tools" not in info.capabilities:
        raise bad(
            "tools",
            f"tools: the chat template of {info.name} has no tool calls. Serve one that has them,"
            " or leave `tools` out and ask for JSON with `response_format`",
            "unsupported_parameter",
        )
    return {"tools": given, **_choice_options(values, given, choice, info)}


def _choice_options(
    values: Mapping[str, Any], given: list[dict[str, Any]], choice: Any, info: ModelInfo
) -> dict[str, Any]:
    """The SDK's `tool_choice`; strict tools, one call at most and allowed tools need a capability."""
    strict_known = "strict_tools" in info.capabilities
    if not strict_known:
        if choice in (None, "auto") and any("strict" in tool for tool in given):
            raise bad(
                "tools",
                "tools: strict tools need `tool_choice: required` at this scheduler",
                "unsupported_value",
            )
        for tool in given:
            tool.pop("strict", None)  # where a call is demanded, its arguments always match the schema
        if values.get("parallel_tool_calls") is False and choice != "none":
            problem = "parallel_tool_calls: this scheduler does not bound the number of calls"
            raise bad("parallel_tool_calls", problem, "unsupported_value")
    if isinstance(choice, dict) and "names" in choice and not strict_known:
        raise unsupported("tool_choice", "allowed_tools", "this scheduler takes all tools, none or one")
    if values.get("parallel_tool_calls") is False and choice != "none":
        return {
            "tool_choice": {
                **(choice if isinstance(choice, dict) else {"mode": choice or "auto"}),
                "max_calls": 1,
            }
        }
    if isinstance(choice, dict) and "name" in choice:
        return {"tool_choice": choice["name"]}
    return {} if choice is None else {"tool_choice": choice}
