"""What the scheduler's API speaks, as frozen dataclasses. Token ids are ints, times milliseconds."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


class FinishReason(enum.Enum):
    """Why a completion ended."""

    STOP = "stop"  # the model's end, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat. Nothing in it is taken for a control token of the model."""

    role: str  # system, user, assistant, ...: what the model's template knows
    content: str
    name: str = ""  # of who speaks, where the template uses it


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of the raw logits: the token's own, and of the k most likely ids."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in completion `index`. `text` may lag behind `token_ids`, and is never retracted."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token id, if asked for
    elapsed_us: int = 0  # from the request's arrival to the last token here, in microseconds


class Drafter(enum.Enum):
    """Who guesses tokens ahead."""

    NGRAM = "ngram"  # what followed the same tokens earlier in prompt and output
    DRAFT_EXECUTOR = "draft-executor"  # a smaller model


@dataclass(frozen=True, slots=True)
class Speculation:
    """How far ahead a request's tokens are guessed, and by whom. It never changes the tokens.

    `mode` is "off", "auto" (a controller chooses for each step, none included) or the number of
    drafts a step; None leaves it to the server. `drafter` None: each that the server has.
    """

    mode: Literal["off", "auto"] | int | None = None
    drafter: Drafter | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What a completion took. Times are since the request's arrival at the scheduler."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted_tokens: int  # sent to be verified
    accepted_tokens: int  # of these
    preemptions: int
    queue_ms: int  # to the first step
    first_token_ms: int
    total_ms: int
    verifications: int = 0  # steps that had drafts
    drafted_by_position: tuple[int, ...] = ()  # the first draft of each verification, the second, ...
    accepted_by_position: tuple[int, ...] = ()

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Of the first drafts of all verifications the share accepted, of the second, ..."""
        counts = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return tuple(accepted / drafted for accepted, drafted in counts)


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of completion `index`, exactly once. At most one of the three matches is set."""

    index: int
    reason: FinishReason
    usage: Usage
    eos_token_id: int | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None


Event = Delta | Finished


@dataclass(frozen=True, slots=True)
class Started:
    """What a scheduler says of a stream with its first event."""

    request_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    seed: int  # the caller's, or drawn: the same request with it gives the same tokens
    max_tokens: int  # resolved: what fits, if the caller gave none
    sampling: Mapping[str, float]  # resolved: temperature, top_k, top_p, ...
    prompt_digest: bytes  # SHA-256 of the prompt's token ids
    model_fingerprint: bytes
    sampler: str  # version of the sampling rules


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole completion. `finished` is None only while a stream is still running."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finished: Finished | None


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a request may ask for."""

    max_n: int
    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_token_ids: int
    max_logit_bias: int
    max_logprobs: int
    max_prompt_bytes: int
    max_queued_requests: int
    max_queued_tokens: int
    max_draft_tokens: int = 0  # of Speculation.mode; 0: the executor verifies no drafts


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model behind a scheduler; lengths in tokens."""

    name: str
    architecture: str
    vocab_size: int
    context_length: int
    max_request_tokens: int  # prompt + max_tokens
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    dtype: str
    version: str  # of Paceline
    model_fingerprint: bytes
    limits: RequestLimits
    contract_revision: int = 0
    capabilities: tuple[str, ...] = ()  # in lower case: chat, logprobs, continuation, ...
    sampler: str = ""  # version of the sampling rules
    drafters: tuple[Drafter, ...] = ()  # that a request may name
    speculation: Speculation = Speculation()  # of requests that name none


@dataclass(frozen=True, slots=True)
class ExecutorStatus:
    """One executor as the scheduler sees it."""

    address: str
    connected: bool
    detail: str
    total_pages: int
    available_pages: int  # free and evictable
    losses: int
    active: bool
    draft: bool = False  # its model drafts for the others'
    draining: bool = False  # takes no new sequences


@dataclass(frozen=True, slots=True)
class Status:
    """The scheduler's live counters; those of requests and tokens are since its start."""

    state: str  # loading, serving, no_executor, draining
    uptime_s: float
    running: int
    waiting: int
    waiting_tokens: int
    ready_executors: int
    requests: int
    finished: int
    cancelled: int
    failed: int
    refused: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    steps: int
    step_ms: float  # moving average
    batch_rows: float  # moving average
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verifications: int = 0
    draft_step_ms: float = 0.0  # moving average, of the draft executor
    page_size: int = 0  # tokens per KV page
    total_pages: int = 0
    available_pages: int = 0  # free and evictable
    seats: int = 0  # sequences that can run at once
    uncomputed_tokens: int = 0  # known tokens of waiting and running sequences not computed yet
    prompt_tokens_per_s: float = 0.0  # computed, over the last seconds
    completion_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Aborted:
    """What Abort did."""

    aborted: tuple[str, ...]
    unknown: tuple[str, ...]


MessageLike = Message | Mapping[str, str]
"""A Message, or a mapping with "role" and "content"."""
