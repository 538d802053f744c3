"""Checks the tools of a chat, the calls in it, and which calls the output may have."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.chat.formats import FORMATS, ToolFormat
from scheduler_service.chat.tools import CallRules, SentTool
from scheduler_service.core.request import OutputGrammar
from scheduler_service.errors import invalid, unsupported
from scheduler_service.model import ServedModel
from scheduler_service.rpc.codec.checks import check_size
from scheduler_service.streams.request import ChatPrompt, Prompt

MAX_TOOLS = 128
MAX_CALLS = 128
"""The most that ToolChoice.max_calls may say."""
MAX_CALL_ID_BYTES = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MODES = frozenset(pb.ToolChoiceMode.values())


def required_format(field: str, model: ServedModel) -> ToolFormat:
    """How the model writes calls. Raises ServiceError that names `field` if that is unknown."""
    if model.tool_format is None:
        raise unsupported(
            field,
            "its chat template takes no tools, or it is unknown how this model writes calls of them; the "
            "scheduler's setting tool-format says so ("
            f"{', '.join(FORMATS)})",
        )
    return model.tool_format


def check_tools(chat: pb.Messages, model: ServedModel) -> tuple[SentTool, ...]:
    """The tools that the model may call: none of them if tool_choice says so. Raises ServiceError.

    Their parameters are parsed elsewhere, when the prompt is tokenized.
    """
    if chat.tools or chat.HasField("tool_choice"):
        required_format("messages.tools" if chat.tools else "messages.tool_choice", model)
    check_size("messages.tools", len(chat.tools), MAX_TOOLS, "tools")
    check_size("messages.tools", tool_bytes(chat), model.limits.max_prompt_bytes, "bytes in all")
    names: set[str] = set()
    tools = []
    for index, tool in enumerate(chat.tools):
        field = f"messages.tools[{index}]"
        check_name(f"{field}.name", tool.name)
        if tool.name in names:
            raise invalid(f"{field}.name", f"{tool.name} is there twice")
        names.add(tool.name)
        if tool.strict:
            _check_restricts(f"{field}.strict", model)
        tools.append(SentTool(tool.name, tool.description, tool.parameters))
    _check_choice(chat.tool_choice, names, model)
    return () if chat.tool_choice.mode == pb.TOOL_CHOICE_MODE_NONE else tuple(tools)


def tool_bytes(chat: pb.Messages) -> int:
    """Bytes of the tools' texts."""
    texts = (text for tool in chat.tools for text in (tool.name, tool.description, tool.parameters))
    return sum(len(text.encode()) for text in texts)


def _check_restricts(field: str, model: ServedModel) -> None:
    """Raises ServiceError unless requests may restrict calls."""
    if not model.max_grammar_bytes:
        raise unsupported(field, "the executor has no grammars, which restricted calls need")
    if not model.restricts_calls:
        name = required_format(field, model).name
        raise unsupported(field, f"there is no grammar of text with calls in the model's format, {name}")


def _check_choice(choice: pb.ToolChoice, names: set[str], model: ServedModel) -> None:
    if choice.mode not in _MODES:
        raise invalid("messages.tool_choice.mode", f"unknown mode {choice.mode}")
    for field in ("max_calls", "names"):
        if getattr(choice, field):
            _check_restricts(f"messages.tool_choice.{field}", model)
            if choice.mode == pb.TOOL_CHOICE_MODE_NONE:
                raise invalid(f"messages.tool_choice.{field}", "not with TOOL_CHOICE_MODE_NONE")
    check_size("messages.tool_choice.max_calls", choice.max_calls, MAX_CALLS, "calls")
    _check_names(choice, names)
    required = choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED
    if required and not names:
        raise invalid("messages.tool_choice.mode", "REQUIRED without tools")
    if choice.name and not required:
        raise invalid("messages.tool_choice.name", "only with TOOL_CHOICE_MODE_REQUIRED")
    if choice.name and choice.name not in names:
        raise invalid("messages.tool_choice.name", f"{choice.name[:64]!r} is none of the tools")


def _check_names(choice: pb.ToolChoice, names: set[str]) -> None:
    if choice.names and choice.name:
        raise invalid("messages.tool_choice.names", "not with a name")
    seen: set[str] = set()
    for index, name in enumerate(choice.names):
        if name in seen or name not in names:
            why = "is there twice" if name in seen else "is none of the tools"
            raise invalid(f"messages.tool_choice.names[{index}]", f"{name[:64]!r} {why}")
        seen.add(name)


def call_rules(chat: pb.Messages, tools: Sequence[SentTool]) -> CallRules | None:
    """Which calls of these tools the output may have; None: any, or none."""
    choice = chat.tool_choice
    wanted = {choice.name} if choice.name else set(choice.names)
    indices = tuple(index for index, tool in enumerate(tools) if not wanted or tool.name in wanted)
    strict = frozenset(index for index in indices if chat.tools[index].strict)
    demanded = choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED
    if not indices or not (demanded or strict or choice.max_calls or choice.names):
        return None
    return CallRules(indices, demanded, 1 if choice.name else choice.max_calls, strict)


def check_restricted(message: pb.GenerateRequest, prompt: Prompt, model: ServedModel) -> None:
    """Raises ServiceError if tools, or restricted calls, don't fit what the request has beside them."""
    if not isinstance(prompt, ChatPrompt) or not prompt.tools:
        return
    if message.HasField("grammar"):
        raise invalid("grammar", "not with tools that may be called; set tool_choice to NONE")
    if prompt.calls is None:
        return
    if not model.max_grammar_bytes:
        raise unsupported("messages.tool_choice", "the executor has no grammars, which demanded calls need")
    if message.stop.ignore_eos:
        raise invalid(
            "stop.ignore_eos", "not with restricted calls: the output ends where their grammar does"
        )


def grammar_of_calls(text: str, model: ServedModel) -> OutputGrammar:
    """The grammar that was made of a request's calls. Raises ServiceError if it is too large."""
    check_size("messages.tools", len(text.encode()), model.max_grammar_bytes, "bytes as a grammar")
    return OutputGrammar("lark", text)


def check_calls(field: str, turn: pb.Message, model: ServedModel) -> list[dict[str, object]]:
    """The calls in a message in the form that chat templates read; their arguments are still JSON text.

    Raises ServiceError if the model's format of calls is unknown, or a call is invalid.
    """
    if not turn.tool_calls:
        return []
    required_format(f"{field}.tool_calls", model)
    check_size(f"{field}.tool_calls", len(turn.tool_calls), MAX_TOOLS, "calls")
    calls: list[dict[str, object]] = []
    for index, call in enumerate(turn.tool_calls):
        at = f"{field}.tool_calls[{index}]"
        check_size(f"{at}.id", len(call.id.encode()), MAX_CALL_ID_BYTES, "bytes")
        check_name(f"{at}.name", call.name)
        function = {"name": call.name, "arguments": call.arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return calls


def check_call_id(field: str, turn: pb.Message, model: ServedModel) -> str:
    """The id of the call that a message answers. Raises ServiceError."""
    required_format(field, model)
    check_size(field, len(turn.tool_call_id.encode()), MAX_CALL_ID_BYTES, "bytes")
    return turn.tool_call_id


def call_bytes(turn: pb.Message) -> int:
    """Bytes of the calls' arguments in a message."""
    return sum(len(call.arguments.encode()) for call in turn.tool_calls)


def check_name(field: str, name: str) -> None:
    """Raises ServiceError unless a tool can have this name."""
    if not _NAME.fullmatch(name):
        raise invalid(field, "must be 1 to 64 letters, digits, - and _")
