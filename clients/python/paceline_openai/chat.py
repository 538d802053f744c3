"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from paceline import Completion, Delta, Event, Finished, ModelInfo, ToolCallDelta, errors
from paceline.aio import Generation

from paceline_openai import logprobs, messages, sampling
from paceline_openai.calls import Call
from paceline_openai.fields import (
    Field,
    Table,
    boolean,
    integer,
    mapping,
    one_of,
    only,
    unsupported,
)
from paceline_openai.refusals import bad
from paceline_openai.streams import Chunks, head
from paceline_openai.usage import reason, stopped_by, usage


def response_format(value: Any, name: str) -> Any:
    """The schema that the answer must match; None for text."""
    given = mapping(value, name)
    kind = one_of("text", "json_object", "json_schema")(given.get("type"), f"{name}.type")
    only(given, name, "type", *(["json_schema"] if kind == "json_schema" else []))
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    inner = mapping(given.get("json_schema"), f"{name}.json_schema")
    only(inner, f"{name}.json_schema", "name", "description", "schema", "strict")
    return mapping(inner.get("schema", {}), f"{name}.json_schema.schema")


TABLE = Table(
    Field("messages", messages.messages, "texts and parts of type `text`; `developer` is `system`;"
          " `reasoning_content` goes back in; where the model's template has no place for it, it is left out,"
          " and the answer's header `x-paceline-warning` says so", required=True),
    *sampling.SHARED,
    Field("max_completion_tokens", integer(1, sampling.UINT32), "without it as many as fit"),
    Field("max_tokens", integer(1, sampling.UINT32), "the same"),
    Field("logprobs", boolean, "texts, bytes and logprobs of the tokens"),
    Field("top_logprobs", integer(0, sampling.UINT32), "and of the likeliest ones; needs `logprobs`"),
    Field("response_format", response_format, "`text`, `json_object`, `json_schema`; a schema holds without"
          " `strict` too"),
    Field("tools", messages.tools, "functions, `strict` ones too"),
    Field("tool_choice", messages.tool_choice, "`auto`, `none`, `required`, a function, `allowed_tools`"),
    Field("parallel_tool_calls", boolean, "false: one call at most"),
    Field("safety_identifier", sampling.label, "as `user`"),
    Field("chat_template_kwargs", mapping, "variables of the chat template, such as `enable_thinking`"),
    Field("continue_final_message", boolean, "the last message goes on"),
    Field("add_generation_prompt", boolean, "false needs `continue_final_message`"),
    Field("prompt_cache_key", sampling.label, "requests with the same key go to the same scheduler"),
    Field("include_reasoning", None, "reasoning comes apart from the answer", (True,)),
    Field("echo", None, "the answer has no prompt in it", (False,)),
    Field("add_special_tokens", None, "the chat template writes them", (False,)),
    Field("store", None, "nothing is stored", (False,)),
    Field("service_tier", None, "there is one; see `priority`", ("auto", "default")),
    Field("modalities", None, "answers are texts", (["text"],)),
    Field("reasoning_effort", None, "give the chat template its variable by `chat_template_kwargs`"),
    Field("verbosity", None, "say it in a message", ("medium",)),
    Field("prompt_cache_retention", None, "prefixes are kept while there is room", ("in_memory",)),
    Field("prompt_cache_options", None, "prefixes are kept while there is room",
          ({}, {"mode": "implicit"})),
    Field("prediction", None, "drafts come from the prompt and the output by themselves"),
    Field("audio", None, "answers are texts"),
    Field("web_search_options", None, "the model reaches nothing"),
    Field("moderation", None, "there is none"),
    Field("functions", None, "use `tools`", ([],)),
    Field("function_call", None, "use `tool_choice`", ("none", "auto")),
    Field("chat_template", None, "the model's own is used"),
    Field("documents", None, "write them into a message", ([],)),
    Field("prompt_logprobs", None, "ask /v1/completions with `echo`"),
)  # fmt: skip


async def answer(call: Call) -> None:
    """Generate, and send the answer. Raises Refusal, `paceline.errors`."""
    sent = options(call.values, call.info) | call.options
    id_ = call.exchange.new_id("chatcmpl-")
    turns = messages.that_fit(call.values["messages"], call)
    sent |= call.affinity(turns)
    generation = call.client.generate(messages=turns, timeout_s=call.timeout_s, request_id=id_, **sent)
    try:
        await (_stream if call.values.get("stream") else _whole)(call, generation, id_)
    finally:
        generation.close()


def options(values: Mapping[str, Any], info: ModelInfo) -> dict[str, Any]:
    """The SDK's options. Raises Refusal."""
    found = sampling.sampling_options(values, info) | messages.tool_options(values, info)
    most = {values[name] for name in ("max_completion_tokens", "max_tokens") if name in values}
    if len(most) > 1:
        raise bad("max_tokens", "max_tokens: max_completion_tokens says something else")
    if most:
        found["max_tokens"] = most.pop()
    if values.get("response_format") is not None:
        if "tools" in found and found["tool_choice"].mode != "none":
            raise unsupported("response_format", "a schema", "it does not go with tools")
        sampling.add_grammars(found, [("response_format", "schema", values["response_format"])])
    if values.get("logprobs"):
        found["logprobs"] = values.get("top_logprobs", 0)
    elif values.get("top_logprobs"):
        raise bad("top_logprobs", "top_logprobs: only with logprobs")
    if "chat_template_kwargs" in values:
        found["template_arguments"] = values["chat_template_kwargs"]
    if values.get("continue_final_message"):
        found["continue_final_message"] = True
    if values.get("add_generation_prompt") is bool(values.get("continue_final_message")):
        raise bad(
            "add_generation_prompt", "add_generation_prompt: it is false where continue_final_message is true"
        )
    if not (values.get("logprobs") or values.get("return_token_ids")):
        found["returns"] = "text"
    return found


class _ChatChunks(Chunks):
    """The chunks of a chat. `_fresh`: completions that had no event yet."""

    def __init__(self, call: Call, id_: str, generation: Generation) -> None:
        super().__init__(call, id_, "chat.completion.chunk", [generation])
        self._ids = bool(call.values.get("return_token_ids"))
        self._logprobs = bool(call.values.get("logprobs"))
        self._fresh = set(range(call.values.get("n", 1)))
        self._called: set[int] = set()

    async def choices(self, place: int, event: Event) -> list[str]:  # noqa: ARG002 - there is one prompt
        """The chunks' choices; the first of a completion has the role."""
        index, found = event.index, []
        if index in self._fresh:
            self._fresh.discard(index)
            found.append(f'{{"index": {index}, "delta": {{"role": "assistant", "content": ""}}, '
                         f'"logprobs": null, "finish_reason": null}}')  # fmt: skip
        if isinstance(event, Finished):
            end = _choice(index, {}, reason(event, called=index in self._called))
            found.append(json.dumps(end | {"stop_reason": stopped_by(event)}))
        elif event.reasoning or event.tool_calls or self._logprobs or self._ids:
            found.append(json.dumps(await self._delta(event)))
        else:
            delta = f'"delta": {{"content": {json.dumps(event.text)}}}'
            found.append(f'{{"index": {index}, {delta}, "logprobs": null, "finish_reason": null}}')
        return found

    async def _delta(self, event: Delta) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": event.text} if event.text else {}
        if event.reasoning:
            delta["reasoning_content"] = event.reasoning
        if event.tool_calls:
            self._called.add(event.index)
            delta["tool_calls"] = [_call_delta(one) for one in event.tool_calls]
        return await _with_tokens(_choice(event.index, delta, None), self._call, event)


def _choice(index: int, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


async def _with_tokens(choice: dict[str, Any], call: Call, given: Delta | Completion) -> dict[str, Any]:
    """The choice with what the request asks for of each token."""
    if call.values.get("logprobs"):
        content = await logprobs.of_chat(call, given.token_ids, given.logprobs)
        choice["logprobs"] = {"content": content, "refusal": None}
    if call.values.get("return_token_ids"):
        choice["token_ids"] = given.token_ids
    return choice


def _call_delta(one: ToolCallDelta) -> dict[str, Any]:
    if one.name:
        function = {"name": one.name, "arguments": one.arguments}
        return {"index": one.index, "id": one.id, "type": "function", "function": function}
    return {"index": one.index, "function": {"arguments": one.arguments}}


async def _stream(call: Call, generation: Generation, id_: str) -> None:
    await _ChatChunks(call, id_, generation).send(_events(generation))


async def _events(generation: Generation) -> AsyncGenerator[tuple[int, Event], None]:
    async for event in generation:
        yield 0, event


async def _whole(call: Call, generation: Generation, id_: str) -> None:
    completions = await generation.collect()
    choices = []
    for one in completions:
        if one.finished is None:
            raise errors.InternalError(f"completion {one.index} has not finished")
        message: dict[str, Any] = {"role": "assistant", "content": one.text, "refusal": None}
        if one.reasoning:
            message["reasoning_content"] = one.reasoning
        if one.tool_calls:
            message["content"] = one.text or None
            message["tool_calls"] = [
                {
                    "id": tool.id,
                    "type": "function",
                    "function": {"name": tool.name, "arguments": tool.arguments},
                }
                for tool in one.tool_calls
            ]
        choice: dict[str, Any] = {
            "index": one.index,
            "message": message,
            "logprobs": None,
            "finish_reason": reason(one.finished, called=bool(one.tool_calls)),
            "stop_reason": stopped_by(one.finished),
        }
        choices.append(await _with_tokens(choice, call, one))
    started = generation.started
    counts = usage([[one.finished for one in completions if one.finished]])
    reply = head(call, id_, "chat.completion", [generation]) | {"choices": choices, "usage": counts}
    if started is not None and started.warnings:
        reply["warnings"] = started.warnings
    await call.exchange.reply_json(reply)
