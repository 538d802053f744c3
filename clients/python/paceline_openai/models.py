"""GET /v1/models, POST /tokenize and /detokenize: what is served, and texts as tokens."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from paceline import ModelInfo

from paceline_openai import messages
from paceline_openai.calls import Call
from paceline_openai.fields import Field, Table, boolean, text, tokens
from paceline_openai.refusals import Refusal, bad

TOKENIZE = Table(
    Field("model", text, "the model or an adapter; without it the model"),
    Field("prompt", text, "a text; or `messages`"),
    Field("messages", messages.messages, "a chat, through the model's chat template"),
    Field("add_special_tokens", None, "texts begin as the tokenizer has them begin", (True,)),
    Field("add_generation_prompt", None, "the prompt ends where an answer begins", (True,)),
    Field("continue_final_message", None, "the prompt ends where an answer begins", (False,)),
    Field("return_token_strs", boolean, "`token_strs`: the text of each token"),
    Field("chat_template", None, "the model's own is used"),
    Field("chat_template_kwargs", None, "the template has its defaults", ({},)),
    Field("tools", None, "leave tools out", ([],)),
)
DETOKENIZE = Table(
    Field("model", text, "the model or an adapter; without it the model"),
    Field("tokens", tokens, "token ids", required=True),
)


def listed(info: ModelInfo, model_name: str) -> list[dict[str, Any]]:
    """The model and its adapters."""
    name = model_name or info.name
    base = {
        "object": "model",
        "created": info.loaded_at_s,
        "owned_by": "paceline",
        "max_model_len": info.context_length,
    }
    adapters = [{"id": one.name, **base, "root": name, "parent": name} for one in info.adapters]
    return [{"id": name, **base, "root": info.name, "parent": None}, *adapters]


async def models(call: Call) -> None:
    """All of them."""
    await call.exchange.reply_json({"object": "list", "data": await _all(call)})


async def model(call: Call) -> None:
    """The one whose name ends the path."""
    name = call.exchange.path.removeprefix("/v1/models/")
    await call.exchange.reply_json(_chosen(name, await _all(call)))


async def _all(call: Call) -> list[dict[str, Any]]:
    """The caller's model and its adapters, then the other models of the address, loaded or not."""
    found = listed(call.info, call.model_name)
    others = await call.client.models(timeout_s=call.timeout_s)
    about = {"object": "model", "created": 0, "owned_by": "paceline"}
    return found + [
        {"id": name, **about, "root": name, "parent": None, "state": state}
        for name, state in others.items()
        if name != call.info.name
    ]


def _found(call: Call, name: str) -> dict[str, Any]:
    """The model or adapter of this name. Raises Refusal, 404."""
    return _chosen(name, listed(call.info, call.model_name))


def _chosen(name: str, models: list[dict[str, Any]]) -> dict[str, Any]:
    for one in models:
        if name in (one["id"], one["root"] if one["parent"] is None else None):
            return one
    message = f"The model `{name[:200]}` does not exist"
    raise Refusal(HTTPStatus.NOT_FOUND, message, code="model_not_found", param="model")


async def tokenize(call: Call) -> None:
    """Token ids of a text or a chat, in vLLM's form."""
    values = call.values
    _found(call, call.shown_model)
    if ("prompt" in values) is ("messages" in values):
        raise bad("prompt", "prompt: give exactly one of prompt and messages", "missing_required_parameter")
    ids = await call.client.tokenize(
        values.get("prompt"), messages=values.get("messages"), timeout_s=call.timeout_s
    )
    reply: dict[str, Any] = {"count": len(ids), "max_model_len": call.info.context_length, "tokens": ids}
    if values.get("return_token_strs"):
        await call.vocabulary.learn(call.client, call.info)
        reply["token_strs"] = [call.vocabulary.text_of(one) for one in ids]
    await call.exchange.reply_json(reply)


async def detokenize(call: Call) -> None:
    """The text of token ids."""
    _found(call, call.shown_model)
    await call.exchange.reply_json(
        {"prompt": await call.client.detokenize(call.values["tokens"], timeout_s=call.timeout_s)}
    )
