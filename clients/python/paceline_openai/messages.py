"""Messages and tools of chats, in the SDK's form. What has no place in the prompt is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline import ModelInfo, ToolChoice

from paceline_openai.calls import Call
from paceline_openai.fields import Kind, array, boolean, mapping, one_of, only, text, unsupported, wrong
from paceline_openai.refusals import bad

_ROLES = ("developer", "system", "user", "assistant", "tool")
_COMMON = ("role", "content", "name")
_OF_ROLE: Mapping[str, tuple[str, ...]] = {
    "assistant": ("tool_calls", "reasoning_content", "reasoning", "refusal"),
    "tool": ("tool_call_id",),
}
_PARTS = {"text": "text", "refusal": "refusal"}
_OF_OUTPUT = ("annotations", "logprobs")  # of answers that are sent back


def messages(value: Any, name: str) -> list[dict[str, Any]]:
    """The turns of a chat, in the SDK's form. Raises Refusal, which names the message's index and field."""
    given = array(value, name)
    if not given:
        raise bad(name, f"{name}: expected at least one message")
    return [_message(one, f"{name}[{index}]") for index, one in enumerate(given)]


def that_fit(turns: list[dict[str, Any]], call: Call) -> list[dict[str, Any]]:
    """The turns without reasoning where the model's template has no place for it; the answer warns then.

    Agents send every answer back as it came, to whatever model goes on with the conversation.
    """
    if "reasoning_input" in call.info.capabilities or not any("reasoning" in one for one in turns):
        return turns
    call.exchange.warn("reasoning was left out: the model's template has no place for it")
    others = [one for one in turns if "reasoning" not in one or one.get("content") or one.get("tool_calls")]
    return [{key: value for key, value in one.items() if key != "reasoning"} for one in others]


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
    if given.get("content") is not None:
        message["content"] = content(given["content"], f"{place}.content")
    elif given.get("refusal") is not None:
        message["content"] = text(given["refusal"], f"{place}.refusal")
    elif not calls:
        message["content"] = "" if role == "assistant" else text(None, f"{place}.content")
    reasoning = given.get("reasoning_content") or given.get("reasoning")
    if reasoning:
        message["reasoning"] = text(reasoning, f"{place}.reasoning_content")
    return message


def content(value: Any, place: str, parts: Mapping[str, str] = _PARTS) -> str:
    """A text, or parts that are texts, joined. `parts`: the field that has the text, by the part's type."""
    if isinstance(value, str):
        return text(value, place)
    if not isinstance(value, list):
        raise wrong(place, "a string or an array of parts", value)
    pieces = []
    for index, one in enumerate(value):
        where = f"{place}[{index}]"
        part = mapping(one, where)
        named = parts.get(text(part.get("type"), f"{where}.type"))
        if named is None:
            raise unsupported(f"{where}.type", part["type"], "the model reads text alone")
        only(part, where, "type", named, *_OF_OUTPUT)
        pieces.append(text(part.get(named), f"{where}.{named}"))
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
    return [tool(*_function(one, f"{name}[{index}]")) for index, one in enumerate(array(value, name))]


def tool(function: dict[str, Any], place: str) -> dict[str, Any]:
    """A function that the model may call, in the SDK's form."""
    only(function, place, "name", "description", "parameters", "strict")
    found: dict[str, Any] = {"name": text(function.get("name"), f"{place}.name")}
    if function.get("description") is not None:
        found["description"] = text(function["description"], f"{place}.description")
    if function.get("parameters") is not None:
        found["parameters"] = mapping(function["parameters"], f"{place}.parameters")
    if function.get("strict") is not None and boolean(function["strict"], f"{place}.strict"):
        found["strict"] = True
    return found


def tool_choice(value: Any, name: str) -> ToolChoice:
    """auto, none, required; a function by name; or several (`allowed_tools`)."""
    if isinstance(value, str):
        return ToolChoice(one_of("auto", "none", "required")(value, name))
    given = mapping(value, name)
    if given.get("type") != "allowed_tools":
        return ToolChoice("required", name=_chosen(given, name))
    only(given, name, "type", "allowed_tools")
    place = f"{name}.allowed_tools"
    return allowed_tools(mapping(given.get("allowed_tools"), place), place, _chosen)


def allowed_tools(given: dict[str, Any], place: str, chosen: Kind, *others: str) -> ToolChoice:
    """The mode and the tools of an `allowed_tools`. chosen: reads a tool's name. others: further fields."""
    only(given, place, "mode", "tools", *others)
    tools = array(given.get("tools"), f"{place}.tools")
    names = [chosen(one, f"{place}.tools[{index}]") for index, one in enumerate(tools)]
    if not names:
        raise bad(f"{place}.tools", f"{place}.tools: expected at least one tool")
    return ToolChoice(one_of("auto", "required")(given.get("mode"), f"{place}.mode"), names=names)


def _chosen(value: Any, place: str) -> str:
    function, where = _function(value, place)
    return text(function.get("name"), f"{where}.name")


def _function(value: Any, place: str) -> tuple[dict[str, Any], str]:
    """The inner object of a function, and its place."""
    given = of_function(value, place)
    only(given, place, "type", "function")
    return mapping(given.get("function"), f"{place}.function"), f"{place}.function"


def of_function(value: Any, place: str) -> dict[str, Any]:
    """An object whose type is `function`. Raises Refusal."""
    given = mapping(value, place)
    if given.get("type") != "function":
        raise unsupported(f"{place}.type", given.get("type"), "the model calls functions alone")
    return given


def tool_options(values: Mapping[str, Any], info: ModelInfo) -> dict[str, Any]:
    """The SDK's options of `tools`, `tool_choice` and `parallel_tool_calls`. Raises Refusal."""
    given, choice = values.get("tools"), values.get("tool_choice", ToolChoice("auto"))
    if not given:
        if choice.mode == "required" or choice.names:
            raise bad("tool_choice", "tool_choice: there are no tools to choose from")
        return {}
    if "tools" not in info.capabilities:
        message = (
            f"tools: the chat template of {info.name} has no tool calls. Serve one that has them, or leave"
        )
        how = " `tools` out and ask for JSON with `response_format`"
        raise bad("tools", message + how, "unsupported_parameter")
    if values.get("parallel_tool_calls") is False and choice.mode != "none" and not choice.name:
        choice = replace(choice, max_calls=1)
    if "strict_tools" not in info.capabilities:
        _check_free(given, choice)
    return {"tools": given, "tool_choice": choice}


def _check_free(tools: list[dict[str, Any]], choice: ToolChoice) -> None:
    """Raises Refusal for what a model whose format of calls has no grammar beside text can't keep."""
    why = "the model's format of calls has no grammar beside text"
    if choice.max_calls:
        raise unsupported("parallel_tool_calls", "false", why)
    if choice.names:
        raise unsupported("tool_choice", "allowed_tools", why)
    if choice.mode == "auto" and any(tool.get("strict") for tool in tools):
        raise unsupported("tools", "strict", f"{why}; `tool_choice: required` makes arguments match")
    for tool in tools:
        tool.pop("strict", None)
