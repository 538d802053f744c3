"""The interface between the engine and a backend: `ForwardRows` in, `ForwardOutputs` out.

The engine owns sequences and pages and calls a backend from one thread only. A backend owns the
weights and the KV storage and keeps no state per sequence: a row carries all that its computation needs.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from executor_service.adapters.weights import AdapterTarget, AdapterWeights
from executor_service.backends.forward_rows import HIDDEN_UNIT as HIDDEN_UNIT
from executor_service.backends.forward_rows import ForwardOutputs, ForwardRows
from executor_service.backends.forward_rows import ForwardRow as ForwardRow
from executor_service.backends.forward_rows import PromptOutputs as PromptOutputs
from executor_service.backends.forward_rows import RowOutput as RowOutput
from executor_service.contract.forward_view import WHOLE, ForwardView
from executor_service.contract.masks import Masks
from executor_service.contract.model_error import ModelError as ModelError
from executor_service.contract.plan import TokenIds
from executor_service.files.model_card import NO_CARD, ModelCard

_DEFAULT_PAGES = 4096


class EmbeddingPooling(enum.Enum):
    """Which hidden state is a text's vector, by the model's own files."""

    LAST = "last"  # of the last token
    MEAN = "mean"  # the mean over all tokens
    CLS = "cls"  # of the first token


@dataclass(frozen=True, slots=True)
class EmbeddingDefaults:
    """How the model's own files make a vector of a text."""

    pooling: EmbeddingPooling | None = None  # None: they do not say
    normalize: bool | None = None  # to length 1; None: they do not say
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts that may precede a text, by name
    default_prompt: str = ""  # name of the one that precedes every text; "": none


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The loaded model, as GetInfo reports it; lengths in tokens, sizes in bytes."""

    name: str
    architecture: str  # "llama", "qwen2", "qwen3", "qwen3_moe", "oracle", "paged-attention"
    vocab_size: int
    context_length: int
    parameters: int
    dtype: str  # of weights and arithmetic: "float32", "bfloat16", ...
    device: str  # "cpu", "cuda:0"
    hidden_size: int  # values of a vector: a final hidden state, or the scores of a classification head
    layers: int
    kv_bytes_per_token: int  # on one rank
    eos_token_ids: tuple[int, ...]
    fingerprint: bytes  # SHA-256 of weights, config and dtype: equal where the outputs are equal
    can_forward: bool = False  # the Forward RPC is supported
    can_mask_forward: bool = False  # with positions and masks of its inputs
    can_sample: bool = True  # False: it has a classification head in place of an output layer
    can_score: bool = False  # rows may have `PromptOutputs.targets`
    can_pool: bool = False  # rows may have the other fields of `PromptOutputs`
    has_tokenizer: bool = True
    heads: int = 0  # query heads of each layer
    kv_heads: int = 0
    head_size: int = 0
    supported_dtypes: tuple[str, ...] = ()  # in which the model can be loaded
    supported_devices: tuple[str, ...] = ("cpu",)
    embedding: EmbeddingDefaults = EmbeddingDefaults()  # with `can_pool`
    adapters: AdapterTarget | None = None  # what adapters may change; None: it has no adapters
    full_attention: bool = True  # some layer sees all tokens; without meaning where there are no heads
    attention_window: int = 0  # tokens that layers with a window see; 0: there are none
    ranks: int = 1  # processes that compute the model together
    card: ModelCard = NO_CARD  # what its files say of it for people


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """What GetTokenizer returns: all that a scheduler needs to encode and decode text."""

    tokenizer_json: bytes  # Hugging Face `tokenizers` format
    chat_template: str  # Jinja; "" when the model has none
    bos_token: str
    eos_token: str
    add_bos: bool  # encode() of plain text starts with bos
    generation_defaults: Mapping[str, float] = field(default_factory=dict)  # temperature, top_p, ...


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The Forward RPC's result for one input, fp32; fields that were not asked for are None."""

    hidden: NDArray[np.float32] | None = None  # [returned, hidden] after the final norm
    embedding: NDArray[np.float32] | None = None  # [hidden]: mean over positions, L2-normalized
    logits: NDArray[np.float32] | None = None  # [returned, vocabulary]


class PendingForward(Protocol):
    """A launched forward, which may not be computed yet."""

    def wait(self) -> None:
        """Block until the forward is computed. May be called from any thread, unlike all other methods."""

    def constrain(self, masks: Mapping[int, Masks | None]) -> None:
        """Bring the masks of the rows that are `masked_later`, by their indices; None: any token.

        Masks [1 + n, bytes] are those of the row's first outputs. It then has no others: of its drafts only
        the first n are verified. Called once where there are such rows: before the next launch, and before
        `wait` and `outputs`.
        """

    def outputs(self) -> ForwardOutputs:
        """Block until computed; one result per row, in the rows' order. Called once, in launch order."""


@dataclass(frozen=True, slots=True)
class ComputedForward:
    """A `PendingForward` whose results are already there."""

    results: ForwardOutputs

    def wait(self) -> None:
        """Return at once."""

    def constrain(self, masks: Mapping[int, Masks | None]) -> None:
        """Raise RuntimeError: what is computed has had its masks."""
        raise RuntimeError("masks came after the tokens")

    def outputs(self) -> ForwardOutputs:
        return self.results


Progress = Callable[[str, float], None]
"""Called with (the current activity, its completed fraction in 0..1)."""


class Backend(Protocol):
    """What the engine calls, from one thread: `load` first, then `allocate`."""

    info: ModelDescription  # readable once `load` has returned
    max_piece_tokens: int  # default bound of a forward's tokens: between forwards a step can be cancelled
    # Number of launches whose outputs may be pending at once; valid after `allocate`. Above 1, rows may set
    # `follows`, `slack` and `masked_later`.
    max_pending_forwards: int

    def load(self, progress: Progress) -> None:
        """Read the model. Raises ModelError."""

    def tokenizer(self) -> TokenizerBundle:
        """The tokenizer's files. Raises ModelError when the model has none."""

    def offer_adapters(self, slots: int, max_bytes: int) -> None:
        """Prepare for adapters in `slots` slots, which take up to `max_bytes` bytes of memory in all.

        Called after `load` and before `default_pages`, where adapters may be loaded.
        """

    def default_pages(self, page_size: int, rows: int, tokens: int) -> int:
        """Number of KV pages that fit in memory after reserving for the largest step (`rows`, `tokens`)."""

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page; padding can make it larger than page_size * `kv_bytes_per_token`."""

    def allocate(self, pages: int, page_size: int) -> None:
        """Allocate KV storage of `pages` pages of `page_size` tokens each; no sequence uses page 0."""

    def capture(self, rows: int, tokens: int, progress: Progress) -> None:
        """Prepare for fast steps of up to `rows` and `tokens` (CUDA graphs); called after `allocate`."""

    def launch(self, rows: ForwardRows) -> PendingForward:
        """Start one forward over all rows, ordered after all earlier launches and page copies.

        Rows and their arrays are read before this returns: the caller may then change the arrays.
        """

    def forward(self, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        """Launch and wait; one result per row, in the rows' order."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page's keys and values in every layer."""

    def forward_once(
        self, inputs: Sequence[TokenIds], want: frozenset[str], view: ForwardView = WHOLE
    ) -> list[ForwardOutput]:
        """One result per input, without using the KV cache; `want`: of "hidden", "embedding", "logits".

        `view`: of each input; of a single one where it has positions or a mask, which is where
        `info.can_mask_forward` is set.
        """

    def memory_bytes(self) -> dict[str, int]:
        """Bytes in use for "weights" and "kv", and "peak" of the process or device where known."""

    def live_bytes(self) -> dict[str, int]:
        """Bytes by uses that change while it computes; any thread, after `load`.

        "activations": what the largest step so far held at once besides weights and pages. "ranks": resident
        memory of the other ranks' processes on this machine. "device": in use on a device with memory of its
        own, by whomever.
        """

    def close(self) -> None:
        """Free memory, threads and files."""


@runtime_checkable
class AdapterBackend(Protocol):
    """What a backend whose `info.adapters` is set has besides."""

    def prepare_adapter(self, weights: AdapterWeights) -> Any:
        """An adapter's weights in memory of its own, in the form that `load_adapter` takes.

        Called beside the steps, from another thread: conversions and copies to the device belong here, and it
        touches nothing that a step reads. The weights fit `info.adapters`. Raises ModelError for weights that
        the device can't hold.
        """

    def load_adapter(self, slot: int, prepared: Any) -> None:
        """Bring what `prepare_adapter` returned to a slot, 0 <= slot < `max_adapter_slots`.

        Ordered after all earlier launches, whose rows may still use what the slot held, and before the next
        one. It waits for nothing: another adapter may have been there, of lower or higher rank.
        """

    def unload_adapter(self, slot: int) -> None:
        """Free what a slot holds, in the same order. No row names the slot until it is loaded again."""


class Synchronous(Backend, ABC):
    """Base of backends whose `launch` returns after computing: one launch at a time.

    The defaults are for KV storage that is small and in host memory.
    """

    info: ModelDescription
    max_piece_tokens = 512
    max_pending_forwards = 1

    def offer_adapters(self, slots: int, max_bytes: int) -> None:
        """Do nothing: adapters take memory when they are loaded."""

    def default_pages(self, page_size: int, rows: int, tokens: int) -> int:
        return _DEFAULT_PAGES

    def page_bytes(self, page_size: int) -> int:
        return page_size * self.info.kv_bytes_per_token

    def capture(self, rows: int, tokens: int, progress: Progress) -> None:
        """Do nothing."""

    def live_bytes(self) -> dict[str, int]:
        return {}

    def launch(self, rows: ForwardRows) -> PendingForward:
        return ComputedForward(ForwardOutputs.of(self.forward(rows), rows.decodes))

    @abstractmethod
    def forward(self, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        """One forward over all rows; one result per row, in the rows' order."""
