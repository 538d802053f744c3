"""Checks and decodes the messages of a chat prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.errors import invalid
from scheduler_service.model import ServedModel
from scheduler_service.rpc.codec.checks import check_size
from scheduler_service.rpc.codec.tools import call_bytes, check_call_id, check_calls, check_tools, tool_bytes
from scheduler_service.streams.request import ChatPrompt

MAX_MESSAGES = 1024
MAX_ROLE_BYTES = 64
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
    arguments = _plain(chat.template_arguments)
    if taken := sorted(_OWN_VARIABLES & arguments.keys()):
        raise invalid(f"messages.template_arguments.{taken[0]}", "is the template's own")
    messages = _messages(chat.messages, tool_bytes(chat), model)
    if chat.continue_final_message and not str(messages[-1]["content"]).strip():
        raise invalid("messages.continue_final_message", "the last message has no content to go on")
    return ChatPrompt(messages, arguments, chat.continue_final_message, tools)


def _plain(struct: Struct) -> dict[str, object]:
    """A Struct as JSON values. Its numbers are doubles; those with an integral value become integers."""

    def plain(value: object) -> object:
        match value:
            case float() if value.is_integer():
                return int(value)
            case dict():
                return {key: plain(item) for key, item in value.items()}
            case list():
                return [plain(item) for item in value]
        return value

    try:
        values = MessageToDict(struct)
    except ValueError as error:  # NaN and infinity are no JSON
        raise invalid("messages.template_arguments", "has a number that is not finite") from error
    return {key: plain(item) for key, item in values.items()}


def _messages(
    messages: Sequence[pb.Message], total: int, model: ServedModel
) -> tuple[Mapping[str, object], ...]:
    """The messages as chat templates read them. `total`: bytes of what else the prompt has."""
    if not messages:
        raise invalid("messages", "must not be empty")
    check_size("messages", len(messages), MAX_MESSAGES, "messages")
    checked: list[Mapping[str, object]] = []
    for index, turn in enumerate(messages):
        if not turn.role:
            raise invalid(f"messages[{index}].role", "must not be empty")
        check_size(f"messages[{index}].role", len(turn.role.encode()), MAX_ROLE_BYTES, "bytes")
        if not _ROLE.fullmatch(turn.role):
            raise invalid(f"messages[{index}].role", "must be letters, digits, - and _")
        check_size(f"messages[{index}].name", len(turn.name.encode()), MAX_ROLE_BYTES, "bytes")
        text = _content(index, turn)
        total += len(text.encode()) + call_bytes(turn)
        check_size(f"messages[{index}].content", total, model.limits.max_prompt_bytes, "bytes in all")
        fields: dict[str, object] = {"role": turn.role, "content": text}
        if turn.name:
            fields["name"] = turn.name
        if turn.tool_calls:
            fields["tool_calls"] = check_calls(f"messages[{index}]", turn, model)
        if turn.tool_call_id:
            fields["tool_call_id"] = check_call_id(f"messages[{index}].tool_call_id", turn, model)
        checked.append(fields)
    return tuple(checked)


def _content(index: int, turn: pb.Message) -> str:
    if not turn.parts:
        return turn.content
    if turn.content:
        raise invalid(f"messages[{index}].parts", "not together with content")
    for at, part in enumerate(turn.parts):
        if part.WhichOneof("part") != "text":
            raise invalid(f"messages[{index}].parts[{at}]", "is empty, or of an unknown kind")
    return "".join(part.text for part in turn.parts)
