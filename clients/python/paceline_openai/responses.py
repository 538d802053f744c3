"""POST /v1/responses, without storage: each request has the whole conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline import Completion, Delta, Finished, FinishReason, ModelInfo, errors
from paceline.aio import Generation

from paceline_openai import chat, items, logprobs, messages, sampling
from paceline_openai.calls import Call
from paceline_openai.fields import Field, Table, array, boolean, integer, mapping, only, text
from paceline_openai.refusals import Refusal, bad, from_error, renamed
from paceline_openai.usage import usage

_LOGPROBS = "message.output_text.logprobs"
_IGNORED = ("reasoning.encrypted_content",)  # reasoning comes as text, and goes back in so


def include(value: Any, name: str) -> bool:
    """Whether logprobs are asked for."""
    for index, one in enumerate(array(value, name)):
        if one not in (_LOGPROBS, *_IGNORED):
            raise bad(f"{name}[{index}]", f"{name}[{index}]: only {_LOGPROBS} is there", "unsupported_value")
    return _LOGPROBS in value


def text_config(value: Any, name: str) -> Any:
    """The schema that the answer must match; None for text."""
    given = mapping(value, name)
    only(given, name, "format", *(["verbosity"] if given.get("verbosity") == "medium" else []))
    if given.get("format") is None:
        return None
    inner, place = mapping(given["format"], f"{name}.format"), f"{name}.format"
    if inner.get("type") != "json_schema":
        return chat.response_format(inner, place)
    only(inner, place, "type", "name", "description", "schema", "strict")
    return mapping(inner.get("schema"), f"{place}.schema")


def reasoning(value: Any, name: str) -> dict[str, Any]:
    """`summary`, which is taken and has no effect, as reasoning comes whole."""
    given = mapping(value, name)
    if given.get("effort") is not None:
        place = f"{name}.effort"
        raise bad(place, f"{place}: give the chat template its variable by `chat_template_kwargs`",
                  "unsupported_value")  # fmt: skip
    only(given, name, "summary", "generate_summary")
    return given


TABLE = Table(
    Field("input", items.items, "a text, or items: messages, `function_call`, `function_call_output`,"
          " `reasoning`, which is treated as in chats", required=True),
    Field("instructions", text, "a system message before the others"),
    *(one for one in sampling.SHARED if one.name not in ("n", "return_token_ids")),
    Field("max_output_tokens", integer(1, sampling.UINT32), "without it as many as fit"),
    Field("top_logprobs", integer(0, sampling.UINT32), "logprobs of the likeliest tokens too"),
    Field("include", include, f"`{_LOGPROBS}`; `reasoning.encrypted_content` has none: reasoning is text"),
    Field("text", text_config, "`format`: `text`, `json_object`, `json_schema`; `verbosity`: `medium` only"),
    Field("tools", items.tools, "functions, `strict` ones too"),
    Field("tool_choice", items.tool_choice, "`auto`, `none`, `required`, a function, `allowed_tools`"),
    Field("parallel_tool_calls", boolean, "false: one call at most"),
    Field("reasoning", reasoning, "`summary` has no effect: reasoning comes whole; `effort` is refused"),
    Field("safety_identifier", sampling.label, "as `user`"),
    Field("prompt_cache_key", sampling.label, "requests with the same key go to the same scheduler"),
    Field("chat_template_kwargs", mapping, "variables of the chat template, such as `enable_thinking`"),
    Field("store", None, "nothing is stored; answers say false without it too", (False,)),
    Field("previous_response_id", None, "nothing is stored: send the conversation in `input`"),
    Field("conversation", None, "nothing is stored: send the conversation in `input`"),
    Field("background", None, "nothing is stored: stay connected", (False,)),
    Field("truncation", None, "nothing is cut off; send less", ("disabled",)),
    Field("max_tool_calls", None, "it bounds tools that a server calls, and there are none"),
    Field("service_tier", None, "there is one; see `priority`", ("auto", "default")),
    Field("prompt_cache_retention", None, "prefixes are kept while there is room", ("in_memory",)),
    Field("prompt_cache_options", None, "prefixes are kept while there is room",
          ({}, {"mode": "implicit"})),
    Field("prompt", None, "there are no stored prompts"),
    Field("context_management", None, "nothing is compacted; send less", ([],)),
    Field("moderation", None, "there is none"),
    Field("background_options", None, "nothing runs in the background: stay connected"),
    Field("access_programs", None, "there are none"),
    Field("image", None, "no images are made"),
)  # fmt: skip


NAMES: Mapping[str, str] = {"max_tokens": "max_output_tokens", "response_format": "text", "messages": "input"}
"""Fields of chats that responses call otherwise."""


async def answer(call: Call) -> None:
    """Generate, and send the answer. Raises Refusal, `paceline.errors`."""
    values = call.values
    options = _options(values, call.info) | call.options
    turns = messages.that_fit(items.with_instructions(values["input"], values.get("instructions")), call)
    options |= call.affinity(turns)
    id_ = call.exchange.new_id("resp_")
    generation = call.client.generate(messages=turns, timeout_s=call.timeout_s, request_id=id_, **options)
    try:
        await (_stream if values.get("stream") else _whole)(call, generation, id_)
    finally:
        generation.close()


def _options(values: Mapping[str, Any], info: ModelInfo) -> dict[str, Any]:
    """The SDK's options: those of a chat with the same meaning. Raises Refusal."""
    of_chats = {name: chats for chats, name in NAMES.items()}
    chats = {of_chats.get(name, name): value for name, value in values.items()}
    chats["logprobs"] = bool(values.get("include") or values.get("top_logprobs"))
    try:
        return chat.options(chats, info)
    except Refusal as refusal:
        if (param := renamed(refusal.param, NAMES)) != refusal.param:
            refusal.message = f"{param}: {refusal.message.partition(': ')[2]}"
        refusal.param = param
        raise


@dataclass
class _Response:
    """What an answer has so far: its items, and the reply that shows them."""

    call: Call
    id_: str
    items: list[dict[str, Any]] = field(default_factory=list)

    def shown(self, status: str, end: Finished | None = None, error: Any = None) -> dict[str, Any]:
        """The response object."""
        values, body = self.call.values, self.call.body
        cut = status == "incomplete"
        reply: dict[str, Any] = {
            "id": self.id_,
            "object": "response",
            "created_at": self.call.created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self.call.shown_model,
            "output": self.items,
            "usage": _usage(end) if end else None,
            "store": False,
            "background": False,
            "truncation": "disabled",
        }
        for name, default in _ECHOED.items():
            reply[name] = default if body.get(name) is None else body[name]
        reply["metadata"] = values.get("metadata", {})
        return reply


_ECHOED: Mapping[str, Any] = {
    "instructions": None, "max_output_tokens": None, "parallel_tool_calls": True,
    "previous_response_id": None, "prompt_cache_key": None, "safety_identifier": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default", "temperature": None, "text": {"format": {"type": "text"}}, "tools": [],
    "tool_choice": "auto", "top_logprobs": 0, "top_p": None, "user": None,
}  # fmt: skip
"""Fields of a request that its response has too, and what it has without them."""


def _usage(end: Finished) -> dict[str, Any]:
    counts = usage([[end]])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
    }


def _status(end: Finished) -> str:
    return "incomplete" if end.reason is FinishReason.LENGTH else "completed"


async def _whole(call: Call, generation: Generation, id_: str) -> None:
    [one] = await generation.collect()
    if one.finished is None:
        raise errors.InternalError("the completion has not finished")
    response = _Response(call, id_)
    events = _Events(response)
    await events.take(_as_delta(one))
    events.close(_status(one.finished))
    await call.exchange.reply_json(response.shown(_status(one.finished), one.finished))


def _as_delta(one: Completion) -> Delta:
    """A whole completion as the only delta of a stream."""
    calls = tuple(items.whole_call(index, call) for index, call in enumerate(one.tool_calls))
    return Delta(0, one.token_ids, one.text, one.logprobs, 0, one.reasoning, calls)


async def _stream(call: Call, generation: Generation, id_: str) -> None:
    response = _Response(call, id_)
    events = _Events(response)
    exchange = call.exchange
    try:
        async for event in generation:
            if not exchange.status:
                await exchange.start_events()
                for kind in ("response.created", "response.in_progress"):
                    events.add(kind, response=response.shown("in_progress"))
            if isinstance(event, Finished):
                status = _status(event)
                events.close(status)
                events.add(f"response.{status}", response=response.shown(status, event))
            else:
                await events.take(event)
            await exchange.write(events.taken())
    except errors.PacelineError as error:
        if not exchange.status:
            raise
        refusal = from_error(error)
        shown = {"code": refusal.code or "server_error", "message": refusal.message}
        events.add("response.failed", response=response.shown("failed", None, shown))
        await exchange.write(events.taken())
    await exchange.write(b"", more=False)


class _Events:
    """The events of an answer, from its deltas; fills the response's items. One item is open at a time."""

    def __init__(self, response: _Response) -> None:
        self._response, self._items = response, response.items
        self._number = 0
        self._bytes = bytearray()
        self._waiting: list[dict[str, Any]] = []  # logprobs of tokens whose text is not there yet
        self._kind: Any = None  # of the open item: "reasoning", "message", or the index of a call

    def taken(self) -> bytes:
        """The events since the last time."""
        found, self._bytes = bytes(self._bytes), bytearray()
        return found

    def add(self, kind: str, **fields: Any) -> None:
        """One more event."""
        content = json.dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        self._bytes += f"event: {kind}\ndata: {content}\n\n".encode()

    async def take(self, delta: Delta) -> None:
        """Open, go on with and close items as a delta says."""
        if delta.logprobs and not (delta.reasoning or delta.tool_calls):
            self._waiting += await logprobs.of_chat(self._response.call, delta.token_ids, delta.logprobs)
        if delta.reasoning:
            self._open("reasoning")
            self._part()["text"] += delta.reasoning
            self._add("response.reasoning_text.delta", content_index=0, delta=delta.reasoning)
        if delta.text:
            self._open("message")
            self._text_delta(delta.text)
        for one in delta.tool_calls:
            self._open(one.index, one.name, one.id)
            self._items[-1]["arguments"] += one.arguments
            if one.arguments:
                self._add("response.function_call_arguments.delta", delta=one.arguments)

    def close(self, status: str = "completed") -> None:
        """The open item is complete."""
        if self._kind is None:
            return
        item = self._items[-1]
        if self._kind == "reasoning":
            self._add("response.reasoning_text.done", content_index=0, text=self._part()["text"])
        elif self._kind == "message":
            part = self._part()
            if self._waiting:  # of tokens without text, as the one that ends the answer
                self._text_delta("")
            self._add(
                "response.output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"]
            )
        else:
            self._add("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        if item.get("content"):
            self._add("response.content_part.done", content_index=0, part=self._part())
        item["status"] = status
        self._add("response.output_item.done", item=item, of_item=False)
        self._kind = None

    def _open(self, kind: Any, name: str = "", call_id: str = "") -> None:
        if kind == self._kind:
            return
        self.close()
        self._kind = kind
        part: dict[str, Any] | None = None
        if kind == "reasoning":
            item, part = items.reasoning_item(), {"type": "reasoning_text", "text": ""}
        elif kind == "message":
            item = items.message_item()
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = items.call_item(name, call_id)
        self._items.append(item)
        self._add("response.output_item.added", item=item, of_item=False)
        if part is not None:
            item["content"].append(part)
            self._add("response.content_part.added", content_index=0, part=part)

    def _text_delta(self, text: str) -> None:
        """Text of the open message, with the logprobs of all tokens that were read for it."""
        scores, self._waiting = self._waiting, []
        part = self._part()
        part["text"] += text
        part["logprobs"] += scores
        self._add("response.output_text.delta", content_index=0, delta=text, logprobs=scores)

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self._items[-1]["content"][0]
        return part

    def _add(self, kind: str, *, of_item: bool = True, **fields: Any) -> None:
        item = {"item_id": self._items[-1]["id"]} if of_item else {}
        self.add(kind, output_index=len(self._items) - 1, **item, **fields)
