"""POST /v1/embeddings, /v1/rerank and /v1/score."""

from __future__ import annotations

import asyncio
import base64
import struct
import uuid
from collections.abc import Mapping
from typing import Any

from paceline_openai import sampling
from paceline_openai.calls import Call, all_of
from paceline_openai.fields import (
    Field,
    Table,
    array,
    boolean,
    integer,
    mapping,
    one_of,
    only,
    text,
    texts,
    tokens,
)
from paceline_openai.prompts import Prompt
from paceline_openai.refusals import bad
from paceline_openai.usage import prompt_usage

MAX_INPUTS = 2048  # OpenAI's
_REPLY_BYTES = 3 << 20  # of one call's vectors: a message has at most 4 MiB
_CALLS_AT_ONCE = 4


def inputs(value: Any, name: str) -> list[Prompt]:
    """A text, texts, token ids, or several lists of them; none empty."""
    given: list[Any] = [value] if isinstance(value, str) else array(value, name)
    if given and isinstance(given[0], int):
        given = [given]
    if not 1 <= len(given) <= MAX_INPUTS:
        raise bad(name, f"{name}: expected 1 to {MAX_INPUTS:,} inputs, got {len(given):,}")
    found: list[Prompt] = []
    for index, one in enumerate(given):
        place = name if isinstance(value, str) else f"{name}[{index}]"
        found.append(text(one, place) if isinstance(one, str) else tokens(one, place))
        if not one:
            raise bad(place, f"{place}: the input is empty")
    return found


def document(value: Any, place: str) -> str:
    """A text, or {"text": ...} as Cohere and Jina have it."""
    if isinstance(value, str):
        return str(text(value, place))
    given = mapping(value, place)
    only(given, place, "text")
    return str(text(given.get("text"), f"{place}.text"))


def documents(value: Any, name: str) -> list[str]:
    """Texts, or objects with one."""
    return [document(one, f"{name}[{index}]") for index, one in enumerate(array(value, name))]


_COMMON = (
    Field("model", text, "the model or an adapter; without it the model"),
    Field("user", sampling.label, "a label in the scheduler's log; no identity"),
    Field(
        "priority",
        integer(-sampling.INT32 - 1, sampling.INT32),
        "higher is first; vLLM's is the other way round",
    ),
    Field("cache_salt", text, "prompts share cached beginnings under the same salt alone"),
)
_PLAIN = (
    Field("truncate_prompt_tokens", None, "nothing is cut off; send shorter texts"),
    Field("add_special_tokens", None, "texts begin as the tokenizer has them begin", (True,)),
)

EMBEDDINGS = Table(
    Field(
        "input", inputs, f"a text, texts, token ids, or lists of them; up to {MAX_INPUTS:,}", required=True
    ),
    Field("encoding_format", one_of("float", "base64"), "`float`, `base64` (32-bit floats, little-endian)"),
    Field("dimensions", integer(1, sampling.UINT32), "how many values, the first ones, scaled to length 1"),
    *_COMMON,
    *_PLAIN,
    Field("normalize", boolean, "vectors have length 1"),
    Field("pooling", one_of("last", "mean"), "`last`, `mean`; without it the model's own"),
    Field("input_type", None, "the model's default prompt is used"),
)

_METHOD = Field(
    "method", one_of("yes_no", "likelihood"), "how documents are judged; see [Rerank](evaluations.md)"
)
_INSTRUCTION = Field("instruction", text, "what makes a document fit")

RERANK = Table(
    Field("query", text, "a text", required=True),
    Field("documents", documents, 'texts, or objects `{"text": ...}`', required=True),
    Field("top_n", integer(0, sampling.UINT32), "how many documents, the best; 0: all"),
    Field("return_documents", boolean, "the texts come back with their scores"),
    _METHOD,
    _INSTRUCTION,
    *_COMMON,
    *_PLAIN,
    Field("max_tokens_per_doc", None, "nothing is cut off; send shorter texts"),
    Field("max_chunks_per_doc", None, "a document is one chunk", (1,)),
    Field("rank_fields", None, "documents have one text"),
)

SCORE = Table(
    Field("text_1", texts, "a text, or one for each of `text_2`"),
    Field("text_2", texts, "a text or texts"),
    Field("queries", texts, "the same as `text_1`"),
    Field("documents", texts, "the same as `text_2`"),
    _METHOD,
    _INSTRUCTION,
    *_COMMON,
    *_PLAIN,
)


async def embeddings(call: Call) -> None:
    """A vector for each input, of several calls where one has no room for them."""
    given: list[Prompt] = call.values["input"]
    size = call.values.get("dimensions") or call.info.embedding_size or 1
    most = max(1, min(call.info.limits.max_inputs or 1, _REPLY_BYTES // (4 * size + 16)))
    limit = asyncio.Semaphore(_CALLS_AT_ONCE)
    options = {
        name: call.values[name] for name in ("dimensions", "normalize", "pooling") if name in call.values
    }

    async def embed(part: list[Prompt]) -> Any:
        async with limit:
            return await call.client.embed(
                part, timeout_s=call.timeout_s, **options, **_options(call, "embd-")
            )

    parts = [given[start : start + most] for start in range(0, len(given), most)]
    replies = await all_of(map(embed, parts))
    coded = call.values.get("encoding_format") == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _base64(vector) if coded else vector}
        for index, vector in enumerate(vector for reply in replies for vector in reply.vectors)
    ]
    shown = {"object": "list", "data": data, "model": call.shown_model, "usage": prompt_usage(*replies)}
    await call.exchange.reply_json(shown)


async def rerank(call: Call) -> None:
    """Documents in the order of how well they answer a query, in the form of Jina and Cohere."""
    given: list[str] = call.values["documents"]
    options = {name: call.values[name] for name in ("top_n", "method", "instruction") if name in call.values}
    reply = await call.client.rerank(
        call.values["query"], given, timeout_s=call.timeout_s, **options, **_options(call, "rerank-")
    )
    results = []
    for one in reply.results:
        result: dict[str, Any] = {"index": one.index, "relevance_score": one.score}
        if call.values.get("return_documents"):
            result["document"] = {"text": given[one.index]}
        results.append(result)
    shown = {"id": reply.request_id, "model": call.shown_model, "results": results}
    await call.exchange.reply_json(shown | {"usage": prompt_usage(reply)})


async def score(call: Call) -> None:
    """How well texts go with others, in vLLM's form; each query's texts are one call of Rerank."""
    pairs = _pairs(call.values)
    by_query: dict[str, list[int]] = {}
    for place, (query, _) in enumerate(pairs):
        by_query.setdefault(query, []).append(place)
    options = {name: call.values[name] for name in ("method", "instruction") if name in call.values}
    limit = asyncio.Semaphore(_CALLS_AT_ONCE)

    async def judge(query: str, places: list[int]) -> Any:
        async with limit:
            given = [pairs[place][1] for place in places]
            return await call.client.rerank(
                query, given, timeout_s=call.timeout_s, **options, **_options(call, "score-")
            )

    replies = await all_of(judge(*one) for one in by_query.items())
    scores = [0.0] * len(pairs)
    for places, reply in zip(by_query.values(), replies, strict=True):
        for one in reply.results:
            scores[places[one.index]] = one.score
    data = [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)]
    shown = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": call.created}
    shown |= {"model": call.shown_model, "data": data, "usage": prompt_usage(*replies)}
    await call.exchange.reply_json(shown)


def _pairs(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """One text and many, or as many of both. Raises Refusal."""
    both = []
    for name, other in (("text_1", "queries"), ("text_2", "documents")):
        if (name in values) is (other in values):
            raise bad(name, f"{name}: give exactly one of {name} and {other}", "missing_required_parameter")
        both.append(values.get(name) or values.get(other) or [])
    first, second = both
    if not second or len(second) > MAX_INPUTS:
        raise bad("text_2", f"text_2: expected 1 to {MAX_INPUTS:,} texts, got {len(second):,}")
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise bad(
            "text_1", f"text_1: expected one text, or as many as text_2: {len(second)}, got {len(first)}"
        )
    return list(zip(first, second, strict=True))


def _options(call: Call, prefix: str) -> dict[str, Any]:
    """Of one call of the SDK, with an id of its own that begins so."""
    shared: dict[str, Any] = {"request_id": call.exchange.new_id(prefix)}
    shared |= {name: call.values[name] for name in ("priority", "cache_salt") if name in call.values}
    return shared | call.options | sampling.label_options(call.values, call.info)


def _base64(vector: tuple[float, ...]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
