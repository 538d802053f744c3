"""Events from the core to the front end: plain data, which can be sent to another process."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from scheduler_service.core.step import ScoredTokens, TopLogprobs
from scheduler_service.core.waiting.reasons import WaitTimes


class EndReason(enum.Enum):
    """Why a completion finished."""

    EOS = "eos"  # one of the model's end tokens
    STOP_TOKEN = "stop_token"  # one of the request's stop token ids
    STOP_STRING = "stop_string"  # found by the front end
    LENGTH = "length"
    EVALUATED = "evaluated"  # nothing more was asked of this input


class Failure(enum.Enum):
    """Why a request failed."""

    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    NO_EXECUTOR = "no_executor"  # none opened caches within failover_timeout_s
    POISON = "poison"  # three executors were lost while they computed it
    NOT_FINITE = "not_finite"  # its logits were NaN or infinite
    REFUSED = "refused"  # the executor refused its row, and would again
    GRAMMAR = "grammar"  # its grammar allows no token after its output, or not the output to be continued


@dataclass(frozen=True, slots=True)
class CompletionUsage:
    """Counts and times of one completion; times are seconds since the request's arrival."""

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
    grammar_drafted_tokens: int = 0  # of drafted_tokens: forced by the grammar
    grammar_accepted_tokens: int = 0  # of accepted_tokens: the same
    queue_waits: WaitTimes = ()  # queue_s, by reason
    preempted_waits: WaitTimes = ()  # time without a cache since the first one


@dataclass(slots=True)
class Tokens:
    """New tokens of one completion, in order.

    Never changed once made; not frozen, because that would make it four times as slow to make.
    """

    request_id: str
    index: int
    ids: tuple[int, ...]
    logprobs: tuple[TopLogprobs, ...] = field(default=())
    cached_tokens: int | None = None  # the prompt's prefix hit, with the request's first tokens; else None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of tokens of a prompt or of an input: each token once, in order, before its first `Tokens`."""

    request_id: str
    index: int
    scores: ScoredTokens


@dataclass(frozen=True, slots=True)
class PromptVector:
    """The vector of an input, right before its end."""

    request_id: str
    index: int
    data: bytes  # fp32, little-endian


@dataclass(frozen=True, slots=True)
class CompletionEnded:
    """A completion finished, or an input was evaluated: its last event."""

    request_id: str
    index: int
    reason: EndReason
    matched_id: int | None  # the eos or stop token id
    usage: CompletionUsage


@dataclass(frozen=True, slots=True)
class Failed:
    """A request failed, with all its completions that have not finished: its last event."""

    request_id: str
    failure: Failure
    message: str
    emitted: bool  # tokens, or logprobs of the prompt, had been emitted before


Event = Tokens | PromptScores | PromptVector | CompletionEnded | Failed
