"""The model that this scheduler serves, as its first executor described it. Fixed from then on."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_service.core.request import DraftingWish, DraftSource


class ServiceState(enum.Enum):
    """What a scheduler can do for a new request: the proto's SchedulerState."""

    LOADING = "loading"  # no executor was ready yet
    SERVING = "serving"
    NO_EXECUTOR = "no_executor"  # none is ready to take new requests; they wait
    DRAINING = "draining"  # takes no new requests


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """What has to be equal for a sequence to go on elsewhere with the same tokens."""

    model: bytes  # SHA-256 of weights, config and dtype
    sampler: str  # version of the sampling rules


@dataclass(frozen=True, slots=True)
class TokenSpace:
    """What has to be equal for one model's tokens to be drafts of another's."""

    fingerprint: bytes  # SHA-256 of the tokenizer; empty: the model has none
    size: int
    sampler: str  # version of the sampling rules: the noise is part of them

    def __str__(self) -> str:
        return f"{self.size} tokens, fingerprint {self.fingerprint.hex()[:12] or 'none'}, {self.sampler}"


@dataclass(frozen=True, slots=True)
class DraftingOffer:
    """What this server offers of speculative decoding."""

    drafters: frozenset[DraftSource] = frozenset({DraftSource.NGRAM})
    default: DraftingWish = field(default_factory=lambda: DraftingWish(frozenset({DraftSource.NGRAM})))


@dataclass(frozen=True, slots=True)
class RequestAllowance:
    """What one request may ask for; the executor's limits and the settings', whichever is less."""

    max_n: int
    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_token_ids: int
    max_logit_bias: int  # entries
    max_logprobs: int
    max_prompt_bytes: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts about the model; lengths in tokens."""

    fingerprints: Fingerprints
    vocabulary: TokenSpace
    name: str
    architecture: str
    dtype: str
    version: str  # of the executor's Paceline
    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    limits: RequestAllowance
    max_draft_tokens: int  # of a fixed number; 0: the executor verifies no drafts
    generation_defaults: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """What `text.TextTools` is made of, and what the model's files say of generation."""

    tokenizer_json: bytes = b""  # empty: the model has no tokenizer
    chat_template: str = ""  # "" when the model has none
    bos_token: str = ""
    eos_token: str = ""
    add_bos: bool = False
    eos_token_ids: frozenset[int] = frozenset()
    generation_defaults: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExecutorView:
    """One executor, as ListExecutors shows it; pages as of its last heartbeat."""

    address: str
    connected: bool
    active: bool
    detail: str  # what it is waiting for, when not connected; that it drains
    total_pages: int
    available_pages: int  # free and evictable
    losses: int
    draft: bool  # its model drafts for the others'
    draining: bool  # takes no new sequences
