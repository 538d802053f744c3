"""The core's own form of the step contract: a `PlannedStep` goes to an executor, a `StepAnswer` comes back.

`link/codec` translates both to and from messages of paceline.executor.v1.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from scheduler_service.core.evaluation import HiddenPooling
from scheduler_service.core.request import SamplingSettings


class RowMode(enum.Enum):
    """What a row brings back when it has computed all known tokens; scores come in any mode."""

    SAMPLE = "sample"
    NONE = "none"
    HIDDEN = "hidden"  # the vector of the prompt


class Code(enum.IntEnum):
    """The google.rpc codes a row or an op can answer with (same numbers)."""

    OK = 0
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class RefusalCause(enum.Enum):
    """The cause of a refused row, where its code alone does not tell it."""

    OTHER = enum.auto()
    GRAMMAR = enum.auto()  # the sequence's grammar
    GRAMMAR_BEHIND = enum.auto()  # the grammar has not read all of the output yet: to be sent again
    ADAPTER = enum.auto()  # the sequence's adapter is not loaded
    ADAPTER_SLOTS = enum.auto()  # all slots hold other adapters


@dataclass(frozen=True, slots=True)
class Capacity:
    """An executor's limits, as GetInfo tells them."""

    total_pages: int
    page_size: int  # tokens
    context_length: int  # tokens
    max_sequences: int
    max_rows: int  # in a step
    max_step_tokens: int  # fed in a step
    max_drafts: int = 64  # in a row
    max_steps: int = 64  # of a row
    max_in_flight: int = 64  # steps sent and not answered
    steps_to_be_busy: int = 1  # in flight, so that the device never waits for the next step
    short_step_s: float = 0.0  # of shorter steps one more has to be in flight
    tokens_to_be_busy: int = 512  # of a step that the device computes at nearly its full rate
    max_adapter_slots: int = 0  # adapters that caches use at once; 0: it has no adapters
    max_output_bytes: int = 16 << 20  # of a step's scores and vectors
    hidden_size: int = 0  # of a vector; 0: it has none


@dataclass(frozen=True, slots=True)
class CacheOpening:
    """Opens a cache with all known tokens of a sequence; this step computes at most `limit` of them."""

    cache_id: int
    tokens: tuple[int, ...]
    prompt_length: int
    limit: int
    sampling: SamplingSettings
    stop_token_ids: tuple[int, ...]  # masked until min_tokens
    min_tokens: int
    salt: bytes
    adapter: bytes  # fingerprint; empty: none
    mode: RowMode = RowMode.SAMPLE
    scored_from: int = 0  # tokens from this position on get scores; 0: none
    pooling: HiddenPooling | None = None  # with RowMode.HIDDEN


@dataclass(slots=True)
class CacheRow:
    """Continues a cache: a prompt chunk of `limit` tokens, a decode, a verification, or `steps` decodes.

    Not changed once its step is sent; drafts and the bound are set while the step is planned. Not frozen,
    because that would make it four times as slow to make.
    """

    cache_id: int
    kv_length: int
    limit: int = 0  # 0: all that is pending
    tokens: tuple[int, ...] = ()  # empty: what the executor has pending
    drafts: tuple[int, ...] = ()
    steps: int = 1  # sample this number of tokens, feeding each back; not together with drafts
    mode: RowMode = RowMode.SAMPLE
    is_bound: bool = False  # `kv_length` is as if all unanswered drafts were accepted: an upper bound


@dataclass(frozen=True, slots=True)
class CacheTruncation:
    """Cuts a cache to `length` tokens and forgets its pending tokens: its next row carries its tokens.

    If it fails, that row is refused.
    """

    cache_id: int
    length: int


@dataclass(frozen=True, slots=True)
class CacheFork:
    """Opens `cache_id` as a copy of the first `length` tokens of `source_id`."""

    source_id: int
    cache_id: int
    length: int
    sampling: SamplingSettings
    stop_token_ids: tuple[int, ...]
    min_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step, done in this order: releases, truncates, forks, rows, openings."""

    number: int  # rises by one per step; the answer repeats it
    releases: tuple[int, ...] = ()
    forks: tuple[CacheFork, ...] = ()
    rows: tuple[CacheRow, ...] = ()
    openings: tuple[CacheOpening, ...] = ()
    truncates: tuple[CacheTruncation, ...] = ()


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Logprobs (natural log, of the raw logits) of one sampled token and of the k most likely tokens."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    def cut(self, k: int) -> TopLogprobs:
        """With at most `k` of the most likely tokens."""
        if len(self.top_ids) <= k:
            return self
        return TopLogprobs(self.logprob, self.top_ids[:k], self.top_logprobs[:k])


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Logprobs of consecutive tokens of a prompt, each given all tokens before it, by the raw logits.

    The sequences are arrays: a prompt may have a hundred thousand tokens, with 20 alternatives each.
    """

    first: int  # position of the first token
    logprobs: Sequence[float]  # natural logs, [tokens]
    k: int = 0
    top_ids: Sequence[int] = ()  # the most likely tokens at each position, [tokens * k]
    top_logprobs: Sequence[float] = ()

    def parts(self, size: int) -> Iterator[ScoredTokens]:
        """The same in parts of at most `size` tokens."""
        for at in range(0, len(self.logprobs), size):
            end, k = at + size, self.k
            yield ScoredTokens(
                self.first + at,
                self.logprobs[at:end],
                k,
                self.top_ids[at * k : end * k],
                self.top_logprobs[at * k : end * k],
            )

    def cut(self, k: int) -> ScoredTokens:
        """With at most `k` of the most likely tokens at each position."""
        if k >= self.k:
            return self
        starts = range(0, len(self.top_ids), self.k)
        ids = array("I", [id_ for at in starts for id_ in self.top_ids[at : at + k]])
        values = array("f", [value for at in starts for value in self.top_logprobs[at : at + k]])
        return ScoredTokens(self.first, self.logprobs, k, ids, values)


@dataclass(slots=True)
class RowAnswer:
    """The answer to a row, an opening or a fork."""

    kv_length: int = 0
    tokens: list[int] = field(default_factory=list)
    cached_length: int = 0
    logprobs: Sequence[TopLogprobs] = ()  # one per token, if asked for
    forced: tuple[int, ...] = ()  # the tokens that come next, where a grammar leaves no choice
    scores: ScoredTokens | None = None  # of the opening's tokens after those that this row computed
    hidden: bytes | None = None  # with RowMode.HIDDEN, of a row that computed all: fp32, little-endian
    code: Code = Code.OK
    message: str = ""
    cause: RefusalCause = RefusalCause.OTHER


@dataclass(slots=True)
class StepAnswer:
    """A step's answer. `rows` has those of the plan's rows, then of its openings, in the plan's order."""

    number: int
    rows: list[RowAnswer]
    forks: list[RowAnswer]
    free_pages: int
    evictable_pages: int
    compute_s: float = 0.0
    lacks_adapter: bool = False  # an opening was refused because its adapter is not loaded
