"""Checks and decodes the messages of a chat prompt."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from google.protobuf.struct_pb2 import Struct, Value
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.chat.reasoning import FIELDS as REASONING_FIELDS
from scheduler_service.errors import invalid, unsupported
from scheduler_service.model import ServedModel
from scheduler_service.rpc.codec.checks import check_size
from scheduler_service.rpc.codec.tools import (
    call_bytes,
    call_rules,
    check_call_id,
    check_calls,
    check_tools,
    tool_bytes,
)
from scheduler_service.streams.request import ChatPrompt

MAX_MESSAGES = 1024
MAX_PARTS = 1024
"""Content parts of all messages of a chat."""
MAX_CALLS = 1024
"""Calls in all messages of a chat: each has its answer, which is a message of its own."""
MAX_ARGUMENT_VALUES = 4096
"""Values in template_arguments, inner ones included."""
MAX_ROLE_BYTES = 64
_ASSISTANTS = frozenset({"assistant", "model"})
_ROLE = re.compile(r"[A-Za-z0-9_-]+")  # templates write it between the parts of control tokens
_OWN_VARIABLES = frozenset(
    {
        "messages",
        "add_generation_prompt",
        "strftime_now",
        "raise_exception",
        "bos_token",
        "eos_token",
        "tools",
    }
)
"""Variables of a chat template that no request may set."""


def check_chat(chat: pb.Messages, model: ServedModel) -> ChatPrompt:
    """The chat prompt of a request. Raises ServiceError."""
    tools = check_tools(chat, model)
    size = chat.template_arguments.ByteSize()
    check_size("messages.template_arguments", size, model.limits.max_prompt_bytes, "bytes")
    arguments = _arguments(chat.template_arguments)
    messages = _messages(chat.messages, tool_bytes(chat), model)
    if chat.continue_final_message and not str(messages[-1]["content"]).strip():
        raise invalid("messages.continue_final_message", "the last message has no content to go on")
    if chat.continue_final_message and chat.omit_opening:
        raise invalid("messages.omit_opening", "not with continue_final_message, which has no opening")
    return ChatPrompt(
        messages,
        arguments,
        continues=chat.continue_final_message,
        opens=not chat.omit_opening,
        tools=tools,
        calls=call_rules(chat, tools),
    )


def _arguments(struct: Struct) -> dict[str, object]:
    """Variables of the template, as JSON values; numbers are doubles, those with an integral value integers.

    Takes microseconds for each value, on the event loop. Raises ServiceError.
    """
    if taken := sorted(name for name in _OWN_VARIABLES if name in struct.fields):
        raise invalid(f"messages.template_arguments.{taken[0]}", "is the template's own")
    left = MAX_ARGUMENT_VALUES

    def plain(value: Value) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise invalid(
                "messages.template_arguments",
                f"has more than {MAX_ARGUMENT_VALUES} values, inner ones included",
            )
        kind = value.WhichOneof("kind")
        match kind:
            case "struct_value":
                return {key: plain(item) for key, item in value.struct_value.fields.items()}
            case "list_value":
                return [plain(item) for item in value.list_value.values]
            case "number_value":
                number = value.number_value
                if not math.isfinite(number):  # no JSON
                    raise invalid("messages.template_arguments", "has a number that is not finite")
                return int(number) if number.is_integer() else number
            case "string_value" | "bool_value":
                return getattr(value, kind)
        return None

    return {key: plain(item) for key, item in struct.fields.items()}


def _messages(
    messages: Sequence[pb.Message], total: int, model: ServedModel
) -> tuple[Mapping[str, object], ...]:
    """The messages as chat templates read them. `total`: bytes of what else the prompt has."""
    if not messages:
        raise invalid("messages", "must not be empty")
    check_size("messages", len(messages), MAX_MESSAGES, "messages")
    checked: list[Mapping[str, object]] = []
    parts = calls = 0
    for index, turn in enumerate(messages):
        parts += len(turn.parts)
        check_size(f"messages[{index}].parts", parts, MAX_PARTS, "parts in all")
        calls += len(turn.tool_calls)
        check_size(f"messages[{index}].tool_calls", calls, MAX_CALLS, "calls in all")
        if not turn.role:
            raise invalid(f"messages[{index}].role", "must not be empty")
        check_size(f"messages[{index}].role", len(turn.role.encode()), MAX_ROLE_BYTES, "bytes")
        if not _ROLE.fullmatch(turn.role):
            raise invalid(f"messages[{index}].role", "must be letters, digits, - and _")
        check_size(f"messages[{index}].name", len(turn.name.encode()), MAX_ROLE_BYTES, "bytes")
        text = _content(index, turn)
        total += len(text.encode()) + call_bytes(turn) + len(turn.reasoning.encode())
        check_size(f"messages[{index}].content", total, model.limits.max_prompt_bytes, "bytes in all")
        fields: dict[str, object] = {"role": turn.role, "content": text}
        if turn.name:
            fields["name"] = turn.name
        if turn.reasoning:
            fields |= _reasoning(f"messages[{index}].reasoning", turn, model)
        if turn.tool_calls:
            fields["tool_calls"] = check_calls(f"messages[{index}]", turn, model)
        if turn.tool_call_id:
            fields["tool_call_id"] = check_call_id(f"messages[{index}].tool_call_id", turn, model)
        checked.append(fields)
    return tuple(checked)


def _reasoning(field: str, turn: pb.Message, model: ServedModel) -> dict[str, object]:
    """The reasoning that an assistant wrote, under the names that chat templates have for it."""
    if turn.role not in _ASSISTANTS:
        raise invalid(field, f"only of an assistant's message, not of {turn.role}'s")
    if not model.takes_reasoning:
        raise unsupported(field, "the model's chat template does not read it: leave it out")
    return dict.fromkeys(REASONING_FIELDS, turn.reasoning)


def _content(index: int, turn: pb.Message) -> str:
    if not turn.parts:
        return turn.content
    if turn.content:
        raise invalid(f"messages[{index}].parts", "not together with content")
    for at, part in enumerate(turn.parts):
        if part.WhichOneof("part") != "text":
            raise invalid(f"messages[{index}].parts[{at}]", "is empty, or of an unknown kind")
    return "".join(part.text for part in turn.parts)
