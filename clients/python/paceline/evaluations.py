"""Frozen dataclasses of `score`, `embed` and `rerank`, which ask about given texts and generate nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

from paceline.chat import MessageLike
from paceline.types import TokenLogprobs


class EvaluationOptions(TypedDict, total=False):
    """Keyword arguments that `score`, `embed` and `rerank` have in common; those of `generate`."""

    model: str  # the served model, the default, or an adapter
    priority: int  # higher is served first
    labels: Mapping[str, str]  # names and texts for the scheduler's log
    cache_salt: str  # inputs share cached prefixes only under the same salt
    request_id: str  # default: a random one


@dataclass(frozen=True, slots=True)
class TextToScore:
    """A text to be scored after a prompt, or as a whole: its first token then has no score.

    Exactly one of `text` and `token_ids` is set, and at most one of `prompt`, `prompt_token_ids` and
    `messages`. Prompt and text are tokenized apart, and joined.
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    messages: Sequence[MessageLike] | None = None  # a prompt, through the model's chat template


ScoreInputLike: TypeAlias = TextToScore | str | Sequence[int]
"""A TextToScore; a text or token ids are scored as a whole."""

EmbedInputLike: TypeAlias = str | Sequence[int]
"""A text, which gets the tokens that the model's tokenizer puts around one, or token ids, as they are."""

PoolingName: TypeAlias = Literal["last", "mean", "cls"]
"""The hidden state that stands for a text: of the last token, the mean over all, or of the first one."""

RerankMethodName: TypeAlias = Literal["yes_no", "likelihood"]
"""`yes_no`: the probability that the model, asked whether the document answers the query, says yes. For
models that were trained to judge so, as Qwen3-Reranker.

`likelihood`: the mean logprob of the query's tokens after the document. For any model.
"""


@dataclass(frozen=True, slots=True)
class EvaluationUsage:
    """Tokens and times of all inputs of a call together. Times count from its arrival at the scheduler."""

    prompt_tokens: int
    cached_tokens: int  # of these, found in the prefix cache
    queue_ms: int  # until the first step
    total_ms: int


@dataclass(frozen=True, slots=True)
class ScoredText:
    """How likely one text is. All logarithms are natural ones, under the raw logits."""

    token_ids: tuple[int, ...]  # the scored ones
    logprobs: tuple[TokenLogprobs, ...]  # one per token id
    logprob: float  # their sum
    perplexity: float  # exp(-logprob / tokens); 1 without a scored token


@dataclass(frozen=True, slots=True)
class ScoreReply:
    """The result of `score`."""

    request_id: str
    texts: tuple[ScoredText, ...]  # one per input
    usage: EvaluationUsage


@dataclass(frozen=True, slots=True)
class EmbedReply:
    """The result of `embed`."""

    request_id: str
    vectors: tuple[tuple[float, ...], ...]  # [inputs][dimensions]
    tokens: tuple[int, ...]  # of each input
    usage: EvaluationUsage


@dataclass(frozen=True, slots=True)
class RankedText:
    """One document's score. `index` is its place among the documents given."""

    index: int
    score: float  # yes_no: 0 to 1; likelihood: at most 0
    empty: bool = False  # the document is empty: it ranks last, and its score means nothing


@dataclass(frozen=True, slots=True)
class RerankReply:
    """The result of `rerank`."""

    request_id: str
    results: tuple[RankedText, ...]  # best first; ties by index
    usage: EvaluationUsage
