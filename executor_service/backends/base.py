"""The border between the engine and what computes: `ForwardRow`s in, `RowOutput`s out.

The engine owns sequences and pages and calls a backend from one thread only. A backend owns the
weights and the KV storage, and keeps nothing per sequence: a row carries all it needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from executor_service.contract.plan import OutputMode, Sampling, TokenIds

_DEFAULT_PAGES = 4096


class ModelError(Exception):
    """The model's files can't be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What GetInfo says about the model; lengths in tokens, sizes in bytes."""

    name: str
    architecture: str  # "llama", "qwen2", "qwen3", "qwen3_moe", "oracle", "paged-attention"
    vocab_size: int
    context_length: int
    parameters: int
    dtype: str  # of weights and arithmetic: "float32", "bfloat16", ...
    device: str  # "cpu", "cuda:0"
    hidden_size: int
    layers: int
    kv_bytes_per_token: int  # on one rank
    eos_token_ids: tuple[int, ...]
    fingerprint: bytes  # SHA-256 of weights + config + dtype: same fingerprint, same model
    can_forward: bool = False  # the Forward RPC works
    has_tokenizer: bool = True
    heads: int = 0  # of queries, in each layer
    kv_heads: int = 0
    head_size: int = 0
    supported_dtypes: tuple[str, ...] = ()  # that the model could be loaded in
    supported_devices: tuple[str, ...] = ("cpu",)


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """What GetTokenizer hands out: all a scheduler needs to turn text into ids and back."""

    tokenizer_json: bytes  # Hugging Face `tokenizers` format
    chat_template: str  # Jinja; "" when the model has none
    bos_token: str
    eos_token: str
    add_bos: bool  # encode() of plain text starts with bos
    generation_defaults: Mapping[str, float] = field(default_factory=dict)  # temperature, top_p, ...


@dataclass(slots=True)  # read-only by agreement: freezing costs 1.4 µs a row, 0.4 ms a step
class ForwardRow:
    """One sequence's part of a forward: feed q tokens at positions start .. start + q - 1.

    KV of token i goes to page `block_table[(start + i) // page_size]`, slot
    `(start + i) % page_size`; positions before `start` are read from there. The last `outputs`
    positions (0 to q) are brought back as `output` says. The output of position p is the token
    at index p + 1 of the sequence: its noise is keyed by (seed, p + 1, id), and its penalties
    see history[: p + 1].

    With `follows` >= 0 the row's one token is not known on the host yet: it is what row `follows` of the
    launch before this one, with one output, samples. `tokens` and the end of `history` are then no tokens.
    """

    start: int
    tokens: TokenIds  # [q], q >= 1
    history: TokenIds  # [start + q]: everything up to and with `tokens`
    prompt_length: int  # history[prompt_length:] is output
    block_table: NDArray[np.int32]  # page numbers, covers start + q tokens
    outputs: int
    output: OutputMode
    sampling: Sampling
    top_k: int = 0  # for OutputMode.TOP_K
    salt: bytes = b""
    follows: int = -1


@dataclass(slots=True)
class RowOutput:
    """One row's outputs, in the order of its positions.

    `finite` is False when any of the row's output logits was NaN or infinite (before masks and
    bias); the other fields are then not used. Logprobs are log-softmax of the raw logits.
    """

    tokens: TokenIds | None = None  # SAMPLE: [outputs]
    logprobs: NDArray[np.float32] | None = None  # SAMPLE with sampling.logprobs: [outputs]
    top_ids: NDArray[np.int32] | None = None  # TOP_K, or SAMPLE with logprobs >= 1: [outputs, k]
    top_logprobs: NDArray[np.float32] | None = None  # the same shape
    logits: NDArray[np.float32] | None = None  # FULL: [outputs, vocabulary]
    finite: bool = True


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The non-autoregressive Forward of one input: fp32, one row per position."""

    hidden: NDArray[np.float32] | None = None  # [q, hidden] after the final norm
    embedding: NDArray[np.float32] | None = None  # [hidden]: mean over positions, L2-normalized
    logits: NDArray[np.float32] | None = None  # [q, vocabulary]


class PendingForward(Protocol):
    """A forward that was launched."""

    def wait(self) -> None:
        """Return when `outputs` need not wait. The one call that another thread may make, at any time."""

    def outputs(self) -> list[RowOutput]:
        """Wait for it: one result a row, in their order. Called once, in the order of the launches."""


@dataclass(frozen=True, slots=True)
class ComputedForward:
    """The `PendingForward` of a forward that is already done."""

    results: list[RowOutput]

    def wait(self) -> None:
        """See `PendingForward`."""

    def outputs(self) -> list[RowOutput]:
        return self.results


Progress = Callable[[str, float], None]
"""Called with (what is being done, fraction done in 0..1)."""


class Backend(Protocol):
    """What an engine needs. All calls come from one thread, `load` first, then `allocate`."""

    info: ModelDescription  # readable once `load` has returned
    max_piece_tokens: int  # of a forward after which it is time to look whether the step is still wanted
    max_pending_forwards: (
        int  # launches that may be unanswered at once, from `allocate` on; above 1 rows can follow others
    )

    def load(self, progress: Progress) -> None:
        """Read the model. Raises ModelError."""

    def tokenizer(self) -> TokenizerBundle:
        """The tokenizer's files. Raises ModelError when the model has none."""

    def default_pages(self, page_size: int, rows: int, tokens: int) -> int:
        """How many pages there is memory for beside steps of up to so many rows and tokens."""

    def page_bytes(self, page_size: int) -> int:
        """Memory of one page: more than its tokens' `kv_bytes_per_token` where its vectors are filled up."""

    def allocate(self, pages: int, page_size: int) -> None:
        """Make KV storage for `pages` pages of `page_size` tokens each; page 0 is never used."""

    def capture(self, rows: int, tokens: int, progress: Progress) -> None:
        """Prepare what makes steps of up to so many rows and tokens fast, once there is KV storage."""

    def launch(self, rows: Sequence[ForwardRow]) -> PendingForward:
        """Begin to compute all rows in one pass, behind all launches and copies before it.

        Rows and their arrays, which are views of what changes, are read before it returns.
        """

    def forward(self, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        """Launch and wait; the result is in the order of the rows."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page's KV."""

    def forward_once(self, inputs: Sequence[TokenIds], want: frozenset[str]) -> list[ForwardOutput]:
        """Compute inputs without touching the cache; `want`: "hidden", "embedding", "logits"."""

    def memory_bytes(self) -> dict[str, int]:
        """Live sizes: "weights", "kv", "peak" where known."""

    def close(self) -> None:
        """Let go of everything."""


class Synchronous(ABC):
    """A backend whose forward computes before it returns: one launch at a time, done when it returns.

    Its KV is in the host's memory and small, unless it says otherwise.
    """

    info: ModelDescription
    max_piece_tokens = 512
    max_pending_forwards = 1

    def default_pages(self, page_size: int, rows: int, tokens: int) -> int:
        return _DEFAULT_PAGES

    def page_bytes(self, page_size: int) -> int:
        return page_size * self.info.kv_bytes_per_token

    def capture(self, rows: int, tokens: int, progress: Progress) -> None:  # noqa: B027  # not abstract
        """There is nothing to prepare."""

    def launch(self, rows: Sequence[ForwardRow]) -> PendingForward:
        return ComputedForward(self.forward(rows))

    @abstractmethod
    def forward(self, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        """See `Backend`."""
