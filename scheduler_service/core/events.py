"""What the core tells the front end. Plain data: it may cross a queue or a process border."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from scheduler_service.core.step import TopLogprobs


class EndReason(enum.Enum):
    """Why a sequence ended well."""

    EOS = "eos"  # one of the model's end tokens
    STOP_TOKEN = "stop_token"  # one of the request's stop token ids
    STOP_STRING = "stop_string"  # found by the front end
    LENGTH = "length"


class Failure(enum.Enum):
    """Why a request ended badly."""

    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    NO_EXECUTOR = "no_executor"  # none came back within failover_timeout_s
    POISON = "poison"  # executors died with it three times
    NOT_FINITE = "not_finite"  # its logits were NaN or infinite
    REFUSED = "refused"  # the executor refused its row for good


@dataclass(frozen=True, slots=True)
class CompletionUsage:
    """What one completion took; times in seconds since the request's arrival."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    queue_s: float  # to the first step
    first_token_s: float
    total_s: float
    verifications: int = 0  # answered rows that had drafts
    drafted_by_position: tuple[int, ...] = ()  # [i]: verifications with more than i drafts
    accepted_by_position: tuple[int, ...] = ()  # [i]: those that accepted more than i


@dataclass(slots=True)
class Tokens:
    """New tokens of one completion, in order.

    Never changed once made; not frozen, because that would make it four times as slow to make.
    """

    request_id: str
    index: int
    ids: tuple[int, ...]
    logprobs: tuple[TopLogprobs, ...] = field(default=())
    cached_tokens: int | None = None  # with the request's first tokens: of its prompt, found in the cache


@dataclass(frozen=True, slots=True)
class CompletionEnded:
    """The one good end of a completion."""

    request_id: str
    index: int
    reason: EndReason
    matched_id: int | None  # the eos or stop token id
    usage: CompletionUsage


@dataclass(frozen=True, slots=True)
class Failed:
    """The bad end of a whole request: all its completions that have not finished."""

    request_id: str
    failure: Failure
    message: str
    emitted: bool  # tokens had been emitted before


Event = Tokens | CompletionEnded | Failed
