"""Frozen dataclasses of the scheduler's API. Token ids are ints; units of time are in the fields' names."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal

from paceline import schemas
from paceline.chat import Message, ToolCall, ToolCallDelta
from paceline.errors import InvalidOutput, InvalidRequest
from paceline.schemas import Parsed, SchemaLike


class FinishReason(enum.Enum):
    """Why a completion ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens was reached, or the context is full


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the raw logits, before temperature and penalties."""

    logprob: float  # of the token
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob) of the most likely ids


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens and text of completion `index`.

    `text`, `reasoning` and `tool_calls` may lag behind `token_ids`, and are never retracted.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token id, if requested
    elapsed_us: int = 0  # from the request's arrival to the delta's last token, in microseconds
    reasoning: str = ""  # what a model writes before its answer
    tool_calls: tuple[ToolCallDelta, ...] = ()


class Drafter(enum.Enum):
    """A source of draft tokens."""

    NGRAM = "ngram"  # the tokens that followed the same n-gram earlier in the prompt or the output
    DRAFT_EXECUTOR = "draft-executor"  # an executor with a smaller model
    GRAMMAR = "grammar"  # the tokens that the request's grammar forces


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding of one request. It never changes which tokens are sampled.

    `mode` is "off", "auto" (a controller chooses the number of drafts of each step, which may be 0) or
    a fixed number of drafts per step; None selects the server's default. `drafter` None allows every
    drafter of the server.
    """

    mode: Literal["off", "auto"] | int | None = None
    drafter: Drafter | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and times of one completion. Times count from the request's arrival at the scheduler."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    completion_tokens: int
    drafted_tokens: int  # drafts that were verified
    accepted_tokens: int  # drafts that were accepted
    preemptions: int
    queue_ms: int  # until the first step
    first_token_ms: int
    total_ms: int
    verifications: int = 0  # steps that verified drafts
    drafted_by_position: tuple[int, ...] = ()  # item i: drafts verified at position i of their step
    accepted_by_position: tuple[int, ...] = ()  # item i: drafts accepted at that position
    reasoning_tokens: int = 0  # of completion_tokens: before the answer, markers included
    grammar_drafted_tokens: int = 0  # of drafted_tokens: forced by the grammar
    grammar_accepted_tokens: int = 0  # of accepted_tokens: forced by the grammar
    # Microseconds until the first step, and those waited after preemptions, by reason: pages, seats, ...
    queue_waits: Mapping[str, int] = field(default_factory=dict, hash=False)
    preempted_waits: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """The share of drafts accepted, 0 to 1, for each position among a step's drafts."""
        counts = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return tuple(accepted / drafted for accepted, drafted in counts)


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of completion `index`; each completion has exactly one.

    `eos_token_id`, `stop_token_id` and `stop_string` tell what ended it; at most one of them is set.
    """

    index: int
    reason: FinishReason
    usage: Usage
    eos_token_id: int | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None


Event = Delta | Finished


@dataclass(frozen=True, slots=True)
class Started:
    """The request with its defaults filled in, as the scheduler reports it when a stream begins."""

    request_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    seed: int  # the caller's, else a random one; repeating the request with it gives the same tokens
    max_tokens: int  # the caller's, else as many as fit
    sampling: Mapping[str, float]  # temperature, top_k, top_p, ..., with the model's defaults filled in
    prompt_digest: bytes  # SHA-256 of the prompt's token ids
    model_fingerprint: bytes
    sampler: str  # version of the sampling rules
    adapter_fingerprint: bytes = b""  # of the adapter that the request names; empty: none
    warnings: tuple[str, ...] = ()  # parts of the request that have no effect
    prompt_token_ids: tuple[int, ...] = ()  # with return_prompt_token_ids


@dataclass(frozen=True, slots=True)
class Completion(Generic[Parsed]):
    """A completion's joined text and tokens. `finished` is None only while its stream is running.

    `Parsed` is the type of `parsed`: for checkers, it is the type that the request's `schema` has.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finished: Finished | None
    reasoning: str = ""  # what a model wrote before its answer
    tool_calls: tuple[ToolCall, ...] = ()
    schema: SchemaLike[Parsed] | None = field(default=None, repr=False, compare=False)  # of the request

    def __str__(self) -> str:
        """The text."""
        return self.text

    @property
    def parsed(self) -> Parsed:
        """The text as the value that `schema` describes: an instance of a pydantic model, else what
        `json.loads` returns.

        Raises InvalidOutput unless the completion ended by itself and the text is valid: the beginning of a
        value is never taken for one. Raises InvalidRequest if the request had no schema.
        """
        if self.schema is None:
            raise InvalidRequest("parsed: the request had no schema")
        if cut := self._cut_off_by():
            raise InvalidOutput(f"completion {self.index} is not a whole value: {cut}")
        try:
            return schemas.parse(self.schema, self.text)
        except InvalidOutput as error:
            raise InvalidOutput(f"completion {self.index}: {error}") from error.__cause__

    def _cut_off_by(self) -> str:
        """What ended it in place of the model; empty if the model did."""
        match self.finished:
            case None:
                return "it has not finished"
            case Finished(reason=FinishReason.LENGTH):
                cut = "it reached max_tokens or the end of the context"
                if self.schema is None or '"additionalProperties"' in schemas.json_schema(self.schema):
                    return cut
                return f'{cut}; without "additionalProperties": false an object may get further properties'
            case Finished(stop_string=str(stop)):
                return f"the stop string {stop!r} ended it"
            case Finished(stop_token_id=int(stop)):
                return f"the stop token {stop} ended it"
        return ""

    def message(self) -> Message:
        """The answer as a turn of the conversation, to be sent back with the next request."""
        return Message("assistant", self.text, tool_calls=self.tool_calls)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Upper bounds of a request's parameters, and of the scheduler's queue."""

    max_n: int  # completions of one request
    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_token_ids: int
    max_logit_bias: int  # entries
    max_logprobs: int  # most likely ids per token
    max_prompt_bytes: int
    max_queued_requests: int
    max_queued_tokens: int
    max_draft_tokens: int = 0  # for Speculation.mode; 0: the executor verifies no drafts
    max_grammar_bytes: int = 0  # of a grammar; 0: the server has none
    max_tools: int = 0  # of a chat; 0: the model has no tool calls
    max_inputs: int = 0  # of a call of score, embed or rerank


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter (LoRA) that requests may name as their `model`.

    ModelInfo tells the first three fields alone; the others are for administrators.
    """

    name: str
    fingerprint: bytes  # SHA-256 of its weights and settings; the same fingerprint gives the same tokens
    rank: int
    memory_bytes: int = 0  # of its weights in one executor
    requests: int = 0  # that named it, since it was loaded
    running: int = 0  # sequences
    waiting: int = 0  # sequences


@dataclass(frozen=True, slots=True)
class EmbeddingInfo:
    """How `embed` makes vectors where a call does not say so."""

    pooling: str  # last, mean or cls
    normalize: bool  # to Euclidean length 1
    prompts: Mapping[str, str]  # texts that may precede an input, by name
    default_prompt: str  # name of the one that precedes inputs by default; empty: none


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller's own identity at a scheduler, and its rights."""

    name: str
    max_priority: int  # the highest `priority` that its requests may have
    admin: bool  # may call AdminService
    directory: bool = False  # may write an entry of the directory of schedulers


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model of a scheduler; lengths in tokens."""

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
    drafters: tuple[Drafter, ...] = ()  # drafters that a request may select
    speculation: Speculation = Speculation()  # of requests that set none
    tool_format: str = ""  # how the model writes tool calls; empty: it has none
    adapters: tuple[AdapterInfo, ...] = ()  # that a request's `model` may name
    embedding_size: int = 0  # dimensions of `embed`'s vectors; 0: the model gives none
    embedding: EmbeddingInfo | None = None  # None: the model gives no vectors
    model_version: str = ""  # as the model's files state it; empty: they do not
    license: str = ""  # likewise
    metadata: Mapping[str, str] = field(default_factory=dict)  # what else the model's files say of it
    loaded_at_s: int = 0  # when the executor had loaded it, in seconds since 1970; 0: unknown
    caller: Caller | None = None  # None: the scheduler is too old to say
    vocabulary_fingerprint: bytes = b""  # SHA-256 of all tokens and their ids; empty: there is no tokenizer
    sampling: Mapping[str, float] = field(default_factory=dict)  # what requests get that set nothing, by name


@dataclass(frozen=True, slots=True)
class ExecutorStatus:
    """One executor as the scheduler sees it."""

    address: str
    connected: bool
    detail: str  # the reason why the executor is not ready; empty if it is
    total_pages: int  # KV pages
    available_pages: int  # free or evictable
    losses: int  # how often the scheduler lost it
    active: bool  # in use; else standby
    draft: bool = False  # a draft executor
    draining: bool = False  # opens no new sequences


@dataclass(frozen=True, slots=True)
class Status:
    """The scheduler's live counters; those of requests, tokens and steps count from its start."""

    state: str  # loading, serving, no_executor, draining, degraded
    uptime_s: float
    running: int  # sequences
    waiting: int  # queued sequences
    waiting_tokens: int  # tokens of the queued sequences
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
    batch_rows: float  # rows per step, moving average
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verifications: int = 0  # rows with drafts that were verified
    draft_step_ms: float = 0.0  # step time of the draft executor, moving average
    page_size: int = 0  # tokens per KV page
    total_pages: int = 0
    available_pages: int = 0  # free or evictable
    seats: int = 0  # number of sequences that can run at once
    uncomputed_tokens: int = 0  # tokens of queued and running sequences that are not computed yet
    prompt_tokens_per_s: float = 0.0  # prompt tokens computed, over the last seconds
    completion_tokens_per_s: float = 0.0  # over the last seconds
    degraded: str = ""  # in the state degraded: for what requests wait although it is there
    degraded_detail: str = ""  # likewise, for people
    waits: Mapping[str, int] = field(default_factory=dict, hash=False)  # microseconds, by reason
    arriving: int = 0  # requests that are not queued yet: their caller's turn, tokenizing, a grammar


@dataclass(frozen=True, slots=True)
class RequestWait:
    """Where a request is, and why. Times are in microseconds; those by reason have the reason's name: pages,
    seats, ...
    """

    request_id: str
    phase: str  # arriving, queued, running, preempted, ended
    phase_us: int  # since it is there; of an ended one since its end
    reason: str = ""  # while it waits
    queue_waits: Mapping[str, int] = field(default_factory=dict, hash=False)  # before its first step
    preempted_waits: Mapping[str, int] = field(default_factory=dict, hash=False)  # after preemptions
    position: int = 0  # in the queue of its identity, from 1 on; 0: it is not there
    # Of the first in that queue: its reason, and of what it needs and finds where that can be counted.
    first_reason: str = ""
    needed: int = 0
    available: int = 0
    total: int = 0  # of what it waits for in the end: how many pages, seats or slots there are in all
    predicted_us: int = 0  # the wait that was predicted when it was queued
    explanation: str = ""  # one paragraph for people, with what would end the wait
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)  # as the request had them
    identity: str = ""  # for administrators


@dataclass(frozen=True, slots=True)
class Waits:
    """The result of `why`."""

    requests: tuple[RequestWait, ...]  # of each scheduler the oldest first
    left_out: int  # further ones, for which a reply had no place


@dataclass(frozen=True, slots=True)
class Aborted:
    """The result of `abort`: the request ids that were aborted, and those that no scheduler knew."""

    aborted: tuple[str, ...]
    unknown: tuple[str, ...]
