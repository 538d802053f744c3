"""What the tokenizer process makes of a request's tools: a grammar, and which arguments may be texts."""

from __future__ import annotations

from dataclasses import replace

from service_kit.identity import Identity

from scheduler_service.errors import invalid
from scheduler_service.link.pool import Served
from scheduler_service.rpc.codec.tools import grammar_of_calls, required_format
from scheduler_service.rpc.statuses import text_errors
from scheduler_service.streams.request import ChatPrompt, CheckedRequest


async def with_tools(checked: CheckedRequest, served: Served, caller: Identity) -> CheckedRequest:
    """A request with the grammar of its calls, if they are restricted, and what is needed to read them.

    Raises ServiceError.
    """
    chat = checked.prompt
    if not isinstance(chat, ChatPrompt) or not chat.tools:
        return checked
    style = required_format("messages.tools", served.model)
    if served.text is None:
        raise invalid("messages", "the model has no tokenizer: send token_ids")
    with text_errors("messages.tools"):
        if style.typed:
            texts = await served.text.texts_of_tools(chat.tools, caller=caller.name)
            checked = replace(checked, prompt=replace(chat, texts=texts))
        if (rules := chat.calls) is None:
            return checked
        text = await served.text.grammar_of_calls(
            rules.bound(chat.tools),
            style.name,
            demanded=rules.demanded,
            max_calls=rules.max_calls,
            caller=caller.name,
        )
    return checked.with_grammar(grammar_of_calls(text, served.model))
