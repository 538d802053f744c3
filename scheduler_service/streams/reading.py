"""How the output of a request is to be read: from its prompt's token ids, and the served model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler_service.chat.reading import ChatReading
from scheduler_service.chat.reasoning import Thinking
from scheduler_service.errors import unsupported
from scheduler_service.model import ServedModel
from scheduler_service.streams.request import ChatPrompt, CheckedRequest
from scheduler_service.text.vocabulary import Vocabulary


def chat_reading(
    checked: CheckedRequest, prompt: Sequence[int], model: ServedModel, vocabulary: Vocabulary
) -> ChatReading | None:
    """How to read the output of a request; None: it is text."""
    chat, markers = checked.prompt, model.reasoning
    if not isinstance(chat, ChatPrompt):
        return None
    tools = {tool.name: chat.texts.get(tool.name, {}) for tool in chat.tools}
    if (whole := model.whole_format) is not None:
        if chat.continues and whole.continued is not None:
            whole = replace(whole, parser=whole.continued)
        return ChatReading(tool_format=whole, tools=tools)
    thinking = Thinking.OFF
    if markers is not None:
        if chat.continues:
            thinking = markers.thinking_in(str(chat.messages[-1]["content"]))
        else:
            thinking = markers.thinking(prompt, vocabulary)
        if thinking is Thinking.POSSIBLE and checked.sampling.grammar is not None:
            thinking = Thinking.INSIDE  # the grammar waits for the reasoning's end
    if thinking is Thinking.OFF and not chat.tools:
        return None
    return ChatReading(
        thinking,
        None if thinking is Thinking.OFF else markers,
        model.tool_format if chat.tools else None,
        tools,
    )


def behind_reasoning(checked: CheckedRequest, reading: ChatReading, model: ServedModel) -> CheckedRequest:
    """The request, its grammar beginning after the token that ends the reasoning; unchanged without either.

    Raises ServiceError if the executor can't do that.
    """
    grammar = checked.sampling.grammar
    if grammar is None or reading.reasoning is None:
        return checked
    if not model.grammars_begin:
        raise unsupported(
            checked.grammar_field,
            "the executor has no grammars that begin after the reasoning; turn the reasoning off",
        )
    late = replace(grammar, begins_after=reading.reasoning.end)
    return replace(checked, sampling=replace(checked.sampling, grammar=late))
