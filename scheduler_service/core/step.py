"""The core's own form of the step contract: a `PlannedStep` goes to an executor, a `StepAnswer` comes back.

`link/codec` translates both to and from messages of paceline.executor.v1.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_service.core.request import SamplingSettings


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
    max_adapter_slots: int = 0  # adapters that caches use at once; 0: it has no adapters


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


@dataclass(slots=True)
class CacheRow:
    """Continues a cache: a prompt chunk of `limit` tokens, a decode, a verification, or `steps` decodes.

    Never changed once made; not frozen, because that would make it four times as slow to make.
    """

    cache_id: int
    kv_length: int
    limit: int = 0  # 0: all that is pending
    tokens: tuple[int, ...] = ()  # empty: what the executor has pending
    drafts: tuple[int, ...] = ()
    steps: int = 1  # sample so many tokens, feeding each back; not together with drafts


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


@dataclass(slots=True)
class RowAnswer:
    """The answer to a row, an opening or a fork."""

    kv_length: int = 0
    tokens: list[int] = field(default_factory=list)
    cached_length: int = 0
    logprobs: Sequence[TopLogprobs] = ()  # one per token, if asked for
    forced: tuple[int, ...] = ()  # the tokens that come next, where a grammar leaves no choice
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
