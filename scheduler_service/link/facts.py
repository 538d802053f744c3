"""What executors say of themselves, and the model that a scheduler makes of it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.service.logs import Log

from scheduler_service.core.ranges import RANGES
from scheduler_service.core.step import Capacity
from scheduler_service.model import Fingerprints, RequestAllowance, ServedModel, TokenizerSource, TokenSpace

log = Log(__name__)


class ExecutorPhase(enum.Enum):
    """Between its start and its end."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"  # what it has goes on, and nothing new begins there


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What an executor can do now: GetStatus."""

    epoch: int = 0  # random, new at each of its starts
    phase: ExecutorPhase | None = None  # None: one that we don't know
    loading: str = ""  # what it is loading
    load_fraction: float = 0.0
    step_age_s: float = 0.0  # since the running step began; 0 without one
    total_pages: int = 0
    available_pages: int = 0  # free and evictable


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no honest answer of an executor exceeds."""

    vocab_size: int
    context_length: int  # tokens
    total_pages: int


@dataclass(frozen=True, slots=True)
class ExecutorFacts:
    """What an executor has and can do, for as long as it lives: GetInfo. Texts are cut to a safe length."""

    epoch: int
    capacity: Capacity
    fingerprints: Fingerprints  # failover demands that it is equal
    vocabulary: TokenSpace  # drafting demands that it is equal
    model_name: str
    architecture: str
    dtype: str
    version: str  # of the executor's Paceline
    eos_token_ids: frozenset[int]
    can_fork: bool
    max_stop_token_ids: int  # of a row
    max_logit_bias: int
    max_logprobs: int

    @property
    def bounds(self) -> Bounds:
        """What its answers are checked against."""
        return Bounds(self.vocabulary.size, self.capacity.context_length, self.capacity.total_pages)


def served_model(facts: ExecutorFacts, tokenizer: TokenizerSource, own: RequestAllowance) -> ServedModel:
    """The model, with the settings' limits narrowed to what this executor takes.

    Raises ValueError if it has more end tokens than a step may carry: no request could be computed.
    """
    eos = _end_tokens(facts, tokenizer)
    if len(eos) > facts.max_stop_token_ids:
        raise ValueError(
            f"the executor's model has {len(eos)} end tokens, but its max_stop_token_ids is "
            f"{facts.max_stop_token_ids}"
        )
    return ServedModel(
        fingerprints=facts.fingerprints,
        vocabulary=facts.vocabulary,
        name=facts.model_name,
        architecture=facts.architecture,
        dtype=facts.dtype,
        version=facts.version,
        vocab_size=facts.vocabulary.size,
        context_length=facts.capacity.context_length,
        eos_token_ids=eos,
        limits=RequestAllowance(
            max_n=min(own.max_n, facts.capacity.max_sequences) if facts.can_fork else 1,
            max_stop_strings=own.max_stop_strings,
            max_stop_string_bytes=own.max_stop_string_bytes,
            # end tokens travel beside them, to be masked until min_tokens
            max_stop_token_ids=max(0, min(own.max_stop_token_ids, facts.max_stop_token_ids - len(eos))),
            max_logit_bias=min(own.max_logit_bias, facts.max_logit_bias),
            max_logprobs=min(own.max_logprobs, facts.max_logprobs),
            max_prompt_bytes=own.max_prompt_bytes,
        ),
        max_draft_tokens=facts.capacity.max_drafts,
        generation_defaults=_generation_defaults(tokenizer.generation_defaults),
    )


def _end_tokens(facts: ExecutorFacts, tokenizer: TokenizerSource) -> frozenset[int]:
    """Ids outside of the vocabulary are never sampled, and executors refuse steps that carry them."""
    given = facts.eos_token_ids | tokenizer.eos_token_ids
    known = frozenset(id_ for id_ in given if id_ < facts.vocabulary.size)
    if known != given:
        outside, size = sorted(given - known)[:8], facts.vocabulary.size
        log.warning("end tokens outside of the vocabulary ignored", ids=outside, vocab_size=size)
    return known


def _generation_defaults(given: Mapping[str, float]) -> dict[str, float]:
    """Those that requests may have: another would make each request fail that does not say its own."""
    defaults = {}
    for key, value in given.items():
        if key not in RANGES:
            continue
        if value in RANGES[key]:
            defaults[key] = value
        else:
            log.warning("sampling default ignored", key=key, value=value, range=str(RANGES[key]))
    return defaults
