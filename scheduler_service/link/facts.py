"""What an executor says of itself, and the served model that a scheduler derives from it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from service_kit.logs import Log

from scheduler_service.core.request import RANGES
from scheduler_service.core.sequence import score_bytes
from scheduler_service.core.step import Capacity
from scheduler_service.model import (
    NO_CARD,
    NO_EMBEDDING_DEFAULTS,
    EmbeddingDefaults,
    Fingerprints,
    ModelCard,
    RequestAllowance,
    ServedModel,
    TokenizerSource,
    TokenSpace,
)

log = Log(__name__)


class ExecutorPhase(enum.Enum):
    """The state of an executor process."""

    LOADING = "loading"
    FAILED = "failed"  # its model can't be loaded
    SERVING = "serving"
    DRAINING = "draining"  # its caches continue, and it opens no new ones


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """An executor's current state: a reply to GetStatus."""

    epoch: int = 0  # random, new at each start of the process
    phase: ExecutorPhase | None = None  # None: a state that this version does not know
    loading: str = ""  # the part of the start that is under way, such as "starting"; FAILED: why
    load_fraction: float = 0.0  # 0 to 1
    step_age_s: float = 0.0  # since the running step began; 0 without one
    total_pages: int = 0
    available_pages: int = 0  # free or cached


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds against which an executor's answers are checked."""

    vocab_size: int
    context_length: int  # tokens
    total_pages: int
    hidden_size: int = 0  # of a vector; 0: the executor has none


@dataclass(frozen=True, slots=True)
class ExecutorFacts:
    """What an executor process has and can do: its reply to GetInfo. Texts are cut by `brief`."""

    epoch: int
    capacity: Capacity
    fingerprints: Fingerprints  # equal in all executors of a scheduler, for failover
    vocabulary: TokenSpace  # equal in its draft executors too
    model_name: str
    architecture: str
    dtype: str
    version: str  # of the executor's Paceline
    eos_token_ids: frozenset[int]
    can_fork: bool
    max_stop_token_ids: int  # of a row
    max_logit_bias: int
    max_logprobs: int
    max_grammar_bytes: int = 0  # 0: it has no grammars
    grammars_begin: bool = False  # after a token, if the scheduler says so
    can_sample: bool = True  # False: its model has a classification head in place of an output layer
    can_score: bool = False  # the tokens of prompts
    card: ModelCard = NO_CARD
    embedding: EmbeddingDefaults = NO_EMBEDDING_DEFAULTS

    @property
    def bounds(self) -> Bounds:
        """The bounds of this executor's answers."""
        capacity = self.capacity
        return Bounds(
            self.vocabulary.size, capacity.context_length, capacity.total_pages, capacity.hidden_size
        )

    def scores(self, max_logprobs: int) -> bool:
        """Whether it scores prompts, with that many alternatives: a step's answer must hold a token's."""
        return self.can_score and score_bytes(max_logprobs) <= self.capacity.max_output_bytes

    @property
    def embedding_size(self) -> int:
        """Values of the vector of a prompt; 0: it has none, or an answer can't hold one."""
        size = self.capacity.hidden_size
        return size if 4 * size <= self.capacity.max_output_bytes else 0


def served_model(facts: ExecutorFacts, tokenizer: TokenizerSource, own: RequestAllowance) -> ServedModel:
    """The model that an executor describes. Its limits are the settings' (`own`), lowered to the executor's.

    Raises ValueError if the model has more end tokens than a row may carry: no request could be computed.
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
            # A row carries the end tokens too, which are masked until min_tokens.
            max_stop_token_ids=max(0, min(own.max_stop_token_ids, facts.max_stop_token_ids - len(eos))),
            max_logit_bias=min(own.max_logit_bias, facts.max_logit_bias),
            max_logprobs=min(own.max_logprobs, facts.max_logprobs),
            max_prompt_bytes=own.max_prompt_bytes,
            max_inputs=own.max_inputs,
        ),
        max_draft_tokens=facts.capacity.max_drafts,
        max_grammar_bytes=facts.max_grammar_bytes,
        grammars_begin=facts.grammars_begin,
        has_adapters=facts.capacity.max_adapter_slots > 0,
        can_sample=facts.can_sample,
        can_score=facts.scores(min(own.max_logprobs, facts.max_logprobs)),
        embedding_size=facts.embedding_size,
        embedding=facts.embedding,
        generation_defaults=_generation_defaults(tokenizer.generation_defaults),
        card=facts.card,
    )


def shortcomings(facts: ExecutorFacts, model: ServedModel) -> list[str]:
    """What requests to the served model may ask for, and this executor has not, or has less of.

    Speed is left out: an executor without drafts, or with fewer pages or rows, gives the same tokens.
    """
    limits = model.limits
    promises = {
        "context_length": (facts.capacity.context_length, model.context_length),
        "forks": (facts.can_fork, limits.max_n > 1),
        "max_stop_token_ids": (
            facts.max_stop_token_ids,
            limits.max_stop_token_ids + len(model.eos_token_ids),
        ),
        "max_logit_bias": (facts.max_logit_bias, limits.max_logit_bias),
        "max_logprobs": (facts.max_logprobs, limits.max_logprobs),
        "max_grammar_bytes": (facts.max_grammar_bytes, model.max_grammar_bytes),
        "grammars that begin after a token": (facts.grammars_begin, model.grammars_begin),
        "adapters": (facts.capacity.max_adapter_slots > 0, model.has_adapters),
        "an output layer": (facts.can_sample, model.can_sample),
        "scores": (facts.scores(limits.max_logprobs), model.can_score),
        "hidden_size": (facts.embedding_size, model.embedding_size),
    }
    return [
        f"{name}: {int(has)}, not {int(wanted)}" for name, (has, wanted) in promises.items() if has < wanted
    ]


def _end_tokens(facts: ExecutorFacts, tokenizer: TokenizerSource) -> frozenset[int]:
    """The model's end tokens without those outside of the vocabulary, for which executors refuse a step."""
    given = facts.eos_token_ids | tokenizer.eos_token_ids
    valid = frozenset(id_ for id_ in given if id_ < facts.vocabulary.size)
    if valid != given:
        outside, size = sorted(given - valid)[:8], facts.vocabulary.size
        log.warning("end tokens outside of the vocabulary ignored", ids=outside, vocab_size=size)
    return valid


def _generation_defaults(given: Mapping[str, float]) -> dict[str, float]:
    """The model's sampling defaults within their ranges; others would fail every request that omits them."""
    defaults = {}
    for key, value in given.items():
        if key not in RANGES:
            continue
        if value in RANGES[key]:
            defaults[key] = value
        else:
            log.warning("sampling default ignored", key=key, value=value, range=str(RANGES[key]))
    return defaults
