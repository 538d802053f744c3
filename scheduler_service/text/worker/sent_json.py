"""JSON that clients wrote, parsed here: a chat with its tools and calls, and the grammar of its output.

A megabyte of small values takes a tenth of a second, which the scheduler's event loop does not have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler_service.chat.argument_texts import text_arguments
from scheduler_service.chat.call_grammar import ToolGrammarError
from scheduler_service.chat.formats import FORMATS
from scheduler_service.chat.json_object import parse_object
from scheduler_service.chat.tools import OfferedTool, SentTool


class SentJsonError(Exception):
    """JSON of a request can't be used. `field`: where it stands."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat as its template reads it."""

    messages: Sequence[Mapping[str, Any]]
    arguments: Mapping[str, object]
    tools: Sequence[Mapping[str, object]]
    continues: bool
    opens: bool
    unparsed: str
    """Field of the first call whose arguments are no JSON object: the template gets their text. "": none."""


def parse_chat(payload: bytes) -> Chat:
    """The chat in the payload of a job. Raises SentJsonError for a tool's parameters."""
    return parsed_chat(json.loads(payload))


def parsed_chat(sent: dict[str, Any]) -> Chat:
    """The chat, its arguments of calls and parameters of tools parsed. Raises SentJsonError."""
    unparsed = ""
    for at, message in enumerate(sent["messages"]):
        for index, call in enumerate(message.get("tool_calls", ())):
            function = call["function"]
            try:
                function["arguments"] = parse_object(function["arguments"])
            except ValueError:
                unparsed = unparsed or f"messages[{at}].tool_calls[{index}].arguments"
    tools = [_parsed(index, SentTool(*tool)).for_template() for index, tool in enumerate(sent["tools"])]
    return Chat(sent["messages"], sent["arguments"], tools, sent["continues"], sent["opens"], unparsed)


def grammar_of_calls(
    payload: bytes, style: str, added: Mapping[str, int], *, demanded: bool, max_calls: int
) -> str:
    """A Lark grammar of calls of the tools in the payload of a job, each with its index in the request.

    `style`: the format's name; `added`: the ids of its markers. If the calls are not `demanded`, it is a
    grammar of text too. Raises SentJsonError.
    """
    numbered = [(index, SentTool(*tool)) for index, tool in json.loads(payload)]
    tools = [_parsed(index, tool) for index, tool in numbered]
    written = FORMATS[style](added)
    assert written is not None  # the scheduler has one of the same tokens
    try:
        if demanded:
            return written.grammar(tools, max_calls)
        assert written.answer is not None
        return written.answer(tools, max_calls)
    except ToolGrammarError as error:
        raise SentJsonError(str(error), _parameters(numbered[error.index][0])) from error


def texts_of_tools(payload: bytes) -> bytes:
    """The arguments that may be texts, of each tool in the payload of a job, as JSON.

    Raises SentJsonError.
    """
    tools = [_parsed(index, SentTool(*tool)) for index, tool in enumerate(json.loads(payload))]
    texts = {tool.name: text_arguments(tool.parameters) for tool in tools}
    return json.dumps(texts, default=sorted, ensure_ascii=False).encode()


def _parsed(index: int, tool: SentTool) -> OfferedTool:
    try:
        return tool.parsed()
    except ValueError as error:
        raise SentJsonError(str(error), _parameters(index)) from error


def _parameters(index: int) -> str:
    return f"messages.tools[{index}].parameters"
