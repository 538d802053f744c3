"""The model that this scheduler serves, its executors, and the service's state, as plain data.

The first executor to connect describes the model; the description never changes afterwards.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_service.chat.formats import ToolFormat
from scheduler_service.chat.reasoning import ReasoningMarkers
from scheduler_service.core.request import DraftingWish, DraftSource


class ServiceState(enum.Enum):
    """How the scheduler treats a new request: the proto's SchedulerState."""

    LOADING = "loading"  # refused: no executor has been ready since the start
    SERVING = "serving"
    NO_EXECUTOR = "no_executor"  # queued: no executor is ready for new sequences
    DRAINING = "draining"  # refused
    DEGRADED = "degraded"  # queued: the queue waits for something that is there, which is a fault


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """Equal in two executors if a sequence of one can continue on the other with the same tokens."""

    model: bytes  # SHA-256 of weights, config and dtype
    sampler: str  # version of the sampling rules
    grammar: str = ""  # version of the grammar engine; empty: none


@dataclass(frozen=True, slots=True)
class TokenSpace:
    """A vocabulary and its sampling rules. Equal in two models if one can draft for the other."""

    fingerprint: bytes  # SHA-256 of the tokenizer; empty: the model has no tokenizer
    size: int  # token ids
    sampler: str  # version of the sampling rules, which include the noise

    def __str__(self) -> str:
        return f"{self.size} tokens, fingerprint {self.fingerprint.hex()[:12] or 'none'}, {self.sampler}"


ALWAYS_DRAFTERS = frozenset({DraftSource.NGRAM, DraftSource.GRAMMAR})
"""Drafters that take no second executor."""


@dataclass(frozen=True, slots=True)
class DraftingOffer:
    """The drafters that this scheduler has, and the drafting of requests that do not choose."""

    drafters: frozenset[DraftSource] = ALWAYS_DRAFTERS
    default: DraftingWish = field(default_factory=lambda: DraftingWish(ALWAYS_DRAFTERS))

    def drafters_for(self, model: ServedModel) -> frozenset[DraftSource]:
        """Those that a request to this model may name: without grammars nothing is forced."""
        return self.drafters if model.max_grammar_bytes else self.drafters - {DraftSource.GRAMMAR}


@dataclass(frozen=True, slots=True)
class RequestAllowance:
    """Limits of one request: for each, the smaller of the executor's limit and the setting."""

    max_n: int
    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_token_ids: int
    max_logit_bias: int  # entries
    max_logprobs: int
    max_prompt_bytes: int
    max_inputs: int = 1024  # of an evaluation


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the model's files say of it for people; empty where they say nothing."""

    version: str = ""
    license: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    loaded_at_s: int = 0  # by an executor, in seconds since 1970; 0: it did not say


NO_CARD = ModelCard()


class TextPooling(enum.Enum):
    """Which hidden state is a text's vector: the proto's Pooling."""

    LAST = "last"  # of the last token
    MEAN = "mean"  # the mean over all tokens
    CLS = "cls"  # of the first token


@dataclass(frozen=True, slots=True)
class EmbeddingDefaults:
    """How vectors are made where a request does not say so."""

    pooling: TextPooling = TextPooling.LAST
    normalize: bool = True  # to Euclidean length 1
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts that may precede a text, by name
    default_prompt: str = ""  # name of the one that precedes every text; empty: none


NO_EMBEDDING_DEFAULTS = EmbeddingDefaults()


_NEUTRAL_SAMPLING: Mapping[str, float] = {
    "temperature": 1.0,
    "top_k": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model and the limits of its requests."""

    fingerprints: Fingerprints
    vocabulary: TokenSpace
    name: str
    architecture: str
    dtype: str
    version: str  # of the executor's Paceline
    vocab_size: int  # token ids
    context_length: int  # tokens
    eos_token_ids: frozenset[int]
    limits: RequestAllowance
    max_draft_tokens: int  # largest fixed number of drafts; 0: the executor verifies no drafts
    max_grammar_bytes: int = 0  # 0: the executor has no grammars
    grammars_begin: bool = False  # the executor has grammars that begin after a token
    has_adapters: bool = False  # requests may name adapters, once some are loaded
    can_sample: bool = True  # False: it has a classification head, whose scores are the vectors
    can_score: bool = False  # the executor scores the tokens of prompts
    embedding_size: int = 0  # values of a prompt's vector; 0: the executor has none
    embedding: EmbeddingDefaults = NO_EMBEDDING_DEFAULTS  # with `embedding_size`
    tool_format: ToolFormat | None = None  # None: chats have no tools
    reasoning: ReasoningMarkers | None = None  # None: the model writes its answer alone
    whole_format: ToolFormat | None = (
        None  # of the output of every chat, reasoning included; None: there is none
    )
    takes_reasoning: bool = False  # its chat template reads the reasoning of messages
    generation_defaults: Mapping[str, float] = field(default_factory=dict)  # sampling parameters by name
    card: ModelCard = NO_CARD

    @property
    def default_sampling(self) -> dict[str, float]:
        """What requests get that set nothing, by name: the model's own, else what changes no distribution."""
        return {**_NEUTRAL_SAMPLING, **self.generation_defaults}

    @property
    def ranks_by_head(self) -> bool:
        """Whether its classification head has one score, by which documents are ranked."""
        return not self.can_sample and self.embedding_size == 1

    @property
    def reasons(self) -> bool:
        """Whether the reasoning is split from its answers."""
        return self.reasoning is not None or self.whole_format is not None

    @property
    def restricts_calls(self) -> bool:
        """Whether a request may say which calls are in an answer that may be text, too."""
        return (
            self.max_grammar_bytes > 0
            and self.tool_format is not None
            and self.tool_format.answer is not None
        )


ADAPTER_NAME_RULE = "1 to 128 letters, digits, '.', '-' and '_', of which the first is a letter or digit"
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


def is_adapter_name(name: str) -> bool:
    """Whether an adapter may have this name: see ADAPTER_NAME_RULE."""
    return _ADAPTER_NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that all executors have loaded."""

    name: str
    path: str  # relative to each executor's adapter directory
    fingerprint: bytes  # of its content: equal on all executors
    rank: int
    bytes: int  # of its weights in one executor


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """The tokenizer's files, for `text.ModelText`; the model's end tokens and sampling defaults."""

    tokenizer_json: bytes = b""  # empty: the model has no tokenizer
    chat_template: str = ""  # empty: the model has none
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
    active: bool  # the scheduler sends it steps
    detail: str  # why it is not connected, or "draining"
    total_pages: int
    available_pages: int  # free or cached
    losses: int  # of its connection, since the scheduler's start
    draft: bool  # its model drafts for the served model
    draining: bool  # takes no new sequences
