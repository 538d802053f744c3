"""Scores as messages, and how large they are."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.channel import PUBLIC_MESSAGE_BYTES
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.core.step import ScoredTokens

MAX_REPLY_BYTES = PUBLIC_MESSAGE_BYTES - (64 << 10)
"""Of scores or vectors in a reply; the rest is for what else it has."""
_ID_BYTES, _LOGPROB_BYTES, _FRAME_BYTES = 5, 4, 16


def scored_token_bytes(k: int) -> int:
    """Maximum size of a scored token in a reply: its id, its logprob and its alternatives."""
    return _ID_BYTES + _LOGPROB_BYTES + _FRAME_BYTES + k * (_ID_BYTES + _LOGPROB_BYTES)


def token_logprobs(scores: ScoredTokens) -> Iterator[pb.TokenLogprobs]:
    """One message per token."""
    k, ids, values = scores.k, scores.top_ids, scores.top_logprobs
    for at, logprob in enumerate(scores.logprobs):
        yield pb.TokenLogprobs(
            logprob=logprob,
            top_ids=ids[at * k : at * k + k],
            top_logprobs=values[at * k : at * k + k],
        )


def prompt_logprobs(scores: ScoredTokens) -> pb.PromptLogprobs:
    """Logprobs of the prompt of a Generate stream."""
    return pb.PromptLogprobs(first=scores.first, logprobs=token_logprobs(scores))
