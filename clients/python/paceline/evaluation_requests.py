"""Protobuf requests of Score, Embed and Rerank from Python arguments. Pure; shared by both clients.

Each has an id, drawn if the caller gave none: sent again, it is the same request.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from paceline.conversations import chat_messages
from paceline.errors import InvalidRequest
from paceline.evaluations import EmbedInputLike, EvaluationOptions, ScoreInputLike, TextToScore
from paceline.fields import refuse, set_field
from paceline.scheduler.v1 import scheduler_pb2 as pb

_Request = TypeVar("_Request", pb.ScoreRequest, pb.EmbedRequest, pb.RerankRequest)

_OPTIONS = frozenset(EvaluationOptions.__annotations__)
_POOLINGS = {"last": pb.POOLING_LAST, "mean": pb.POOLING_MEAN, "cls": pb.POOLING_CLS}
_METHODS = {"yes_no": pb.RERANK_METHOD_YES_NO, "likelihood": pb.RERANK_METHOD_LIKELIHOOD}


def score_request(
    inputs: Sequence[ScoreInputLike], top_logprobs: int | None, options: Mapping[str, Any]
) -> pb.ScoreRequest:
    """The Score request. Raises InvalidRequest, naming the argument; TypeError for a wrong type."""
    request = _with_options(pb.ScoreRequest(), options)
    for index, given in enumerate(_items("inputs", "texts to score", inputs)):
        _set_scored(request.inputs.add(), given, f"inputs[{index}]")
    if top_logprobs is not None:
        set_field(request, "top_logprobs", top_logprobs, "top_logprobs")
    return request


def embed_request(
    inputs: Sequence[EmbedInputLike],
    options: Mapping[str, Any],
    *,
    pooling: str | None,
    normalize: bool | None,
    dimensions: int | None,
    prompt: str | None = None,
    prompt_name: str | None = None,
) -> pb.EmbedRequest:
    """The Embed request. Raises InvalidRequest, naming the argument; TypeError for a wrong type."""
    if prompt is not None and prompt_name is not None:
        raise InvalidRequest("prompt_name: give at most one of prompt and prompt_name")
    request = _with_options(pb.EmbedRequest(), options)
    for index, given in enumerate(_items("inputs", "texts or token ids", inputs)):
        _set_text_or_ids(request.inputs.add(), given, f"inputs[{index}]")
    if pooling is not None:
        request.pooling = _named("pooling", _POOLINGS, pooling)
    if normalize is not None:
        set_field(request, "normalize", normalize, "normalize")
    if dimensions is not None:
        set_field(request, "dimensions", dimensions, "dimensions")
    if prompt is not None:
        set_field(request, "prompt_text", prompt, "prompt")
    if prompt_name is not None:
        set_field(request, "prompt_name", prompt_name, "prompt_name")
    return request


def rerank_request(
    query: str,
    documents: Sequence[str],
    method: str | None,
    instruction: str | None,
    top_n: int | None,
    options: Mapping[str, Any],
) -> pb.RerankRequest:
    """The Rerank request. Raises InvalidRequest, naming the argument; TypeError for a wrong type."""
    request = _with_options(pb.RerankRequest(), options)
    set_field(request, "query", query, "query")
    set_field(request, "documents", documents, "documents")
    if method is not None:
        request.method = _named("method", _METHODS, method)
    if instruction is not None:
        set_field(request, "instruction", instruction, "instruction")
    if top_n is not None:
        set_field(request, "top_n", top_n, "top_n")
    return request


def _with_options(request: _Request, options: Mapping[str, Any]) -> _Request:
    for name, value in options.items():
        if name not in _OPTIONS:
            raise TypeError(f"unknown option {name!r}")
        set_field(request, name, value, name)
    if not request.request_id:
        request.request_id = uuid.uuid4().hex
    return request


def _items(name: str, kind: str, given: object) -> Iterable[Any]:
    """The inputs of a call. A single string would be as many inputs as it has characters: TypeError."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        refuse(name, f"a sequence of {kind}", given)
    return given


def _set_scored(wire: pb.ScoreInput, given: Any, name: str) -> None:
    if not isinstance(given, TextToScore):
        _set_text_or_ids(wire, given, name)
        return
    if (given.text is None) == (given.token_ids is None):
        raise InvalidRequest(f"{name}: give exactly one of text and token_ids")
    prompts = (given.prompt, given.prompt_token_ids, given.messages)
    if sum(prompt is not None for prompt in prompts) > 1:
        raise InvalidRequest(f"{name}: give at most one of prompt, prompt_token_ids and messages")
    if given.prompt is not None:
        set_field(wire, "prompt_text", given.prompt, f"{name}.prompt")
    elif given.prompt_token_ids is not None:
        wire.prompt_token_ids.SetInParent()  # an empty list must reach the service, which refuses it
        set_field(wire.prompt_token_ids, "ids", given.prompt_token_ids, f"{name}.prompt_token_ids")
    elif given.messages is not None:
        wire.prompt_messages.CopyFrom(chat_messages(given.messages, f"{name}.messages"))
    if given.text is not None:
        set_field(wire, "text", given.text, f"{name}.text")
    else:
        wire.token_ids.SetInParent()
        set_field(wire.token_ids, "ids", given.token_ids, f"{name}.token_ids")


def _set_text_or_ids(wire: pb.ScoreInput | pb.EmbedInput, given: Any, name: str) -> None:
    if isinstance(given, str):
        set_field(wire, "text", given, name)
    else:
        wire.token_ids.SetInParent()
        set_field(wire.token_ids, "ids", given, name)


def _named(name: str, values: Mapping[str, Any], given: object) -> Any:
    if not isinstance(given, str) or given not in values:
        raise InvalidRequest(f"{name}: expected one of {', '.join(values)}, got {given!r}")
    return values[given]
