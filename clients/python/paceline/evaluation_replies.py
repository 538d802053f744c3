"""The results of `score`, `embed` and `rerank` from protobuf replies. Pure; shared by both clients."""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.errors import InternalError, incomplete
from paceline.evaluations import EmbedReply, EvaluationUsage, RankedText, RerankReply, ScoredText, ScoreReply
from paceline.responses import token_logprobs
from paceline.scheduler.v1 import scheduler_pb2 as pb


def score_reply(message: pb.ScoreResponse, request: pb.ScoreRequest) -> ScoreReply:
    """The scores of all inputs. Raises InternalError if some are missing, or not a number."""
    _check_count("scores", len(message.scores), len(request.inputs))
    return ScoreReply(
        message.request_id,
        tuple(_scored_text(one, index) for index, one in enumerate(message.scores)),
        _usage(message.usage),
    )


def embed_reply(message: pb.EmbedResponse, request: pb.EmbedRequest) -> EmbedReply:
    """The vectors of all inputs.

    Raises InternalError if some are missing, of different lengths, or have values that are not a number.
    """
    _check_count("vectors", len(message.embeddings), len(request.inputs))
    sizes = {len(one.values) for one in message.embeddings}
    if len(sizes) != 1 or 0 in sizes or (request.dimensions and sizes != {request.dimensions}):
        raise incomplete(f"the reply has vectors of {sorted(sizes)} values")
    _check_numbers("a vector", (sum(one.values) for one in message.embeddings))
    return EmbedReply(
        message.request_id,
        tuple(tuple(one.values) for one in message.embeddings),
        tuple(one.tokens for one in message.embeddings),
        _usage(message.usage),
    )


def rerank_reply(message: pb.RerankResponse, request: pb.RerankRequest) -> RerankReply:
    """The best documents. Raises InternalError if some are missing, twice there, unknown or have no score."""
    count = len(request.documents)
    _check_count("results", len(message.results), min(request.top_n or count, count))
    indexes = [one.index for one in message.results]
    if len(set(indexes)) != len(indexes) or max(indexes, default=0) >= count:
        raise incomplete(f"the reply ranks the documents {indexes[:8]} of {count}")
    _check_numbers("a document's score", (one.score for one in message.results))
    return RerankReply(
        message.request_id,
        tuple(RankedText(one.index, one.score, one.empty) for one in message.results),
        _usage(message.usage),
    )


def _scored_text(message: pb.Score, index: int) -> ScoredText:
    if len(message.token_ids) != len(message.logprobs):
        raise incomplete(
            f"score {index} has {len(message.logprobs)} logprobs of {len(message.token_ids)} tokens"
        )
    _check_numbers(f"score {index}", (message.logprob, message.perplexity))
    return ScoredText(
        tuple(message.token_ids), token_logprobs(message.logprobs), message.logprob, message.perplexity
    )


def _check_count(what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise incomplete(f"the reply has {found} {what}, not {wanted}")


def _check_numbers(what: str, found: Iterable[float]) -> None:
    if any(map(math.isnan, found)):
        raise InternalError(f"{what} is not a number")


def _usage(message: pb.InputUsage) -> EvaluationUsage:
    return EvaluationUsage(message.prompt_tokens, message.cached_tokens, message.queue_ms, message.total_ms)
