"""The endpoints: method and path, the table of their fields, and what answers them."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from paceline_openai import chat, completions, evaluations, models, responses
from paceline_openai.calls import Call
from paceline_openai.fields import Table


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One of the API's endpoints. Without a `table` it has no body."""

    path: str
    about: str
    answer: Callable[[Call], Awaitable[None]]
    table: Table | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)  # fields of chats that it calls otherwise

    @property
    def method(self) -> str:
        """POST if there is a body."""
        return "GET" if self.table is None else "POST"

    @property
    def names(self) -> Mapping[str, str]:
        """What it calls fields of other endpoints; what the model reads is the last required one."""
        fields = self.table.fields.values() if self.table else ()
        [*_, prompt] = ["prompt", *(one.name for one in fields if one.required)]
        return {"prompt": prompt, **self.renamed}


_LOGPROBS = {"logprobs": "top_logprobs"}  # the contract's is a number

ENDPOINTS = (
    Endpoint("/v1/models", "the model and its adapters", models.models),
    Endpoint("/v1/models/{model}", "one of them", models.model),
    Endpoint("/v1/chat/completions", "the answer to a chat", chat.answer, chat.TABLE, _LOGPROBS),
    Endpoint("/v1/responses", "the answer to items, without storage", responses.answer, responses.TABLE,
             {**responses.NAMES, **_LOGPROBS}),
    Endpoint("/v1/completions", "what follows a text", completions.answer, completions.TABLE,
             {"top_logprobs": "logprobs", "prompt_logprobs": "logprobs"}),
    Endpoint("/v1/embeddings", "vectors of texts", evaluations.embeddings, evaluations.EMBEDDINGS),
    Endpoint(
        "/v1/rerank", "documents by how well they answer a query", evaluations.rerank, evaluations.RERANK
    ),
    Endpoint("/v1/score", "how well pairs of texts go together", evaluations.score, evaluations.SCORE),
    Endpoint("/tokenize", "token ids of a text or a chat", models.tokenize, models.TOKENIZE),
    Endpoint("/detokenize", "the text of token ids", models.detokenize, models.DETOKENIZE),
)  # fmt: skip
"""All that need a key where the schedulers demand tokens."""

ALIASES: Mapping[str, str] = {"/rerank": "/v1/rerank", "/v2/rerank": "/v1/rerank", "/score": "/v1/score"}

_BY_PATH = {endpoint.path: endpoint for endpoint in ENDPOINTS}


def endpoint_of(path: str) -> Endpoint | None:
    """The endpoint at a path."""
    path = ALIASES.get(path, path)
    if path.startswith("/v1/models/") and len(path) > len("/v1/models/"):
        return _BY_PATH["/v1/models/{model}"]
    return _BY_PATH.get(path) if "{" not in path else None


def versioned(path: str) -> str:
    """A suggestion to append to an error message about a path: the endpoint whose path is similar."""
    known = {one.path.removeprefix("/v1"): one.path for one in ENDPOINTS}
    near = difflib.get_close_matches(path.lower().removeprefix("/v1").rstrip("/"), known, n=1, cutoff=0.8)
    return f"; did you mean {known[near[0]]}?" if near else ""
