"""Steps as the engine sees them: a `StepPlan` in, a `StepResult` out.

This is the border between the service (protobuf, asyncio) and the engine (one thread, no I/O). Standard
library and numpy only. `rpc/codec` has checked shapes and ranges; a row or op that failed is a `Refusal` in
its place. What depends on the state of a sequence is checked when its pages are reserved
(`steps/reservation.py`).

Terms: the *KV length* n of a sequence is the number of tokens whose keys and values are cached. *Pending*
tokens are known but not cached yet: the rest of a prompt, or the token sampled last.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from executor_service.contract.grammar import Grammar
from executor_service.contract.masks import Masks
from executor_service.contract.step_table import StepTable

T = TypeVar("T")

TokenIds = NDArray[np.int32]
"""Token ids, int32, shape [tokens]."""

NO_TOKENS: TokenIds = np.zeros(0, np.int32)


class OutputMode(enum.IntEnum):
    """What a row returns for each of its output positions."""

    SAMPLE = 0  # token ids chosen by the executor's sampler, and logprobs if its `Sampling` asks for them
    TOP_K = 1  # the k most likely ids with their logprobs; nothing is sampled
    FULL = 2  # raw fp32 logits; nothing is sampled
    NONE = 3  # nothing; the row only extends the cache
    HIDDEN = 4  # a vector of hidden states, where the row leaves nothing pending; nothing is sampled


class PoolingKind(enum.IntEnum):
    """Which vector a sequence's rows with OutputMode.HIDDEN return, of hidden states after the final norm."""

    LAST = 0  # of the last token
    MEAN = 1  # the mean over all tokens of the opening


@dataclass(slots=True)
class TokenScores:
    """How likely given tokens are, each given all tokens before it, by the raw logits."""

    first: int  # position of the first token
    logprobs: NDArray[np.float32]  # [tokens]
    top_ids: NDArray[np.int32]  # [tokens, k], most likely first
    top_logprobs: NDArray[np.float32]  # the same shape


DRAWING = np.dtype(
    [("seed", "<u8"), ("temperature", "<f4"), ("top_k", "<i4"), ("top_p", "<f4"), ("min_p", "<f4")]
)
"""What `Sampling.drawing` has the bytes of."""

MIN_TEMPERATURE = 1e-6
"""Temperatures between 0 and this are raised to it, so that logits / temperature stays finite."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one sequence; sent once, when it is opened.

    Applied in this order: repetition, presence and frequency penalties and logit bias; the row's mask; stop
    ids masked until `min_tokens` tokens were output; temperature; top-k, top-p, min-p; then
    argmax(logits + Gumbel noise), with no noise at temperature 0. Ties go to the lowest id.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # over prompt and output; 1: off
    presence_penalty: float = 0.0  # over the output only
    frequency_penalty: float = 0.0  # over the output only
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # uint64
    logprobs: int | None = None  # None: none; k: of the chosen token and of the k most likely
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None  # of the output; masks what is sampled, in the place of a row's mask
    drawing: bytes = field(init=False, repr=False, compare=False)
    """The numbers by which a token is drawn from adjusted logits, as a `DRAWING`: those of many rows are read
    as one array."""

    def __post_init__(self) -> None:
        temperature = max(self.temperature, MIN_TEMPERATURE) if self.temperature else 0.0
        numbers = (self.seed, temperature, self.top_k, self.top_p, min(self.min_p, 1.0))
        object.__setattr__(self, "drawing", np.array(numbers, DRAWING).tobytes())

    @property
    def only_draws(self) -> bool:
        """Whether tokens are drawn from the logits as they are, and returned alone."""
        return not (
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or (self.stop_token_ids and self.min_tokens)
            or self.grammar is not None
            or self.logprobs is not None
        )


@dataclass(frozen=True, slots=True)
class Opening:
    """A row that opens a sequence. Its forward starts at the prefix hit h <= `max_hit`."""

    cache_id: int
    tokens: TokenIds  # the whole prompt (and earlier output, after a preemption)
    prompt_length: int  # tokens[prompt_length:] count as output for the penalties
    limit: int  # compute at most this many pending tokens; 0: all
    sampling: Sampling
    output: OutputMode = OutputMode.SAMPLE
    top_k: int = 0  # for OutputMode.TOP_K
    salt: bytes = b""  # prefix-cache namespace
    mask: Masks | None = None  # [1, bytes]: what the token sampled by this row may be; None: any
    adapter: bytes = b""  # fingerprint; empty: the model as it is
    scored_from: int = 0  # tokens[scored_from:] get scores, in this row and those that continue it; 0: none
    pooling: PoolingKind = PoolingKind.LAST

    @property
    def max_hit(self) -> int:
        """Maximum prefix hit, in tokens: what the forwards have to compute is not taken from the cache."""
        if self.pooling is PoolingKind.MEAN:
            return 0
        return (self.scored_from or len(self.tokens)) - 1


@dataclass(slots=True)  # read-only by agreement: freezing costs 1 µs a row
class Row:
    """A row that continues a sequence of this session."""

    cache_id: int
    kv_length: int  # the KV length the client expects, or an upper bound of it
    tokens: TokenIds  # empty: feed the pending tokens; otherwise these replace the token sampled last
    drafts: TokenIds  # tokens to verify after the pending ones
    limit: int = 0  # compute at most this many pending tokens; 0: all
    steps: int = 1  # tokens to sample, each fed back for the next
    output: OutputMode = OutputMode.SAMPLE
    top_k: int = 0
    is_bound: bool = False  # `kv_length` is an upper bound; the row starts at the sequence's KV length
    masks: Masks | None = None  # [1 + drafts, bytes]: what its tokens may be; None: any

    @property
    def only_decodes(self) -> bool:
        """Whether it computes all pending tokens, samples one, and does nothing else.

        It then has NO_TOKENS itself for what it does not have, as the rows that the codec makes.
        """
        return not (
            self.limit
            or self.tokens is not NO_TOKENS
            or self.drafts is not NO_TOKENS
            or self.steps > 1
            or self.output
            or self.is_bound
            or self.masks is not None
        )


@dataclass(frozen=True, slots=True)
class Release:
    """Release these caches and their pages. Unknown ids are no error."""

    cache_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Truncate:
    """Shorten a cache to `length` tokens (0 <= length <= n), without pending tokens."""

    cache_id: int
    length: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Open `cache_id` as a copy of the first `length` cached tokens of `source_id`."""

    source_id: int
    cache_id: int
    length: int
    sampling: Sampling


Op = Release | Truncate | Fork


class PlannedRows(StepTable["Row | Refusal"]):
    """The rows of a step that continue sequences. A refusal has zeros in the columns."""

    __slots__ = ("cache_ids", "kv_lengths")

    def __init__(
        self, cache_ids: list[int], kv_lengths: list[int], others: dict[int, Row | Refusal] | None = None
    ) -> None:
        """`others`: the rows that do not only decode."""
        super().__init__(others or {})
        self.cache_ids, self.kv_lengths = cache_ids, kv_lengths

    def __len__(self) -> int:
        return len(self.cache_ids)

    def _row_of_columns(self, index: int) -> Row:
        return Row(self.cache_ids[index], self.kv_lengths[index], NO_TOKENS, NO_TOKENS)


NO_ROWS = PlannedRows([], [])


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: ops in order, then all rows side by side; rows before openings."""

    session_id: int = 0  # 0: the default session
    step_id: int = 0  # 0: no replay protection
    epoch: int = 0  # 0: any
    digest: bytes = b""  # of the request's content; tells a replay from a reused step_id
    ops: tuple[Op | Refusal, ...] = ()
    rows: PlannedRows = NO_ROWS
    openings: tuple[Opening | Refusal, ...] = ()


class Reason(enum.Enum):
    """Why a step, an op or a row was refused (the proto's ErrorReason); `errors.py` has the gRPC codes."""

    INVALID = "invalid"  # the message names the field
    TOO_LARGE = "too_large"  # beyond one of GetInfo's limits
    CACHE = "cache"  # unknown or released
    SESSION = "session"  # unknown
    CACHE_ID_USED = "cache_id_used"  # in use, or used before in this session
    KV_LENGTH = "kv_length"  # another KV length than the client expects
    EPOCH = "epoch"  # the executor was restarted
    FENCED = "fenced"  # the session was replaced
    STEP_GAP = "step_gap"  # steps before this one are missing
    STEP_FORGOTTEN = "step_forgotten"  # done, but its reply is not stored any more
    STEP_CONTENT = "step_content"  # done with other content
    PAGES = "pages"
    SEQUENCES = "sequences"
    SESSIONS = "sessions"
    QUEUE = "queue"  # too many steps are queued
    QUOTA = "quota"  # session 0's share is used up
    LOADING = "loading"
    DRAINING = "draining"
    UNSUPPORTED = "unsupported"  # not advertised by GetInfo
    NOT_FINITE = "not_finite"  # the row's logits were NaN or infinite
    TOKENIZER = "tokenizer"  # the model has none
    UNAUTHENTICATED = "unauthenticated"
    PERMISSION = "permission"
    INTERNAL = "internal"  # a bug
    GRAMMAR = "grammar"  # can't be compiled, does not allow a given token, or allows no token at all
    ADAPTER = "adapter"  # not loaded, or no such directory
    ADAPTER_SLOTS = "adapter_slots"  # all hold adapters of live caches
    ADAPTER_INVALID = "adapter_invalid"  # of another model or of a kind that is not supported
    ADAPTER_NAME = "adapter_name"  # belongs to another adapter
    ADAPTER_MEMORY = "adapter_memory"  # too many adapters, or bytes of them
    GRAMMAR_BEHIND = "grammar_behind"  # it has not read all of the output yet: try again


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error of one op or row, whose neighbours are not affected."""

    reason: Reason
    message: str
    kv_length: int | None = None  # with Reason.KV_LENGTH: the sequence's


class RequestRefused(Exception):
    """A whole request, such as a step, was refused before anything changed."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal(reason, message)


class Abandoned(Exception):
    """Work was given up because no client waits for it any more. A step was undone: nothing has changed."""


Forwards = Generator[None, bool, T]
"""Work of several forwards, which returns a T. It is suspended before each forward, and resumed with a bool:
whether a client still waits for the result."""


@dataclass(slots=True)
class RowResult:
    """The result of one row. With a `refusal` nothing has changed, and the other fields are empty.

    Arrays have one entry for each output position; with drafts, for each accepted one and the one after.
    """

    kv_length: int = 0
    cached_length: int = 0  # openings: the prefix hit h
    tokens: list[int] = field(default_factory=list)
    logprobs: NDArray[np.float32] | None = None  # [outputs]
    top_ids: NDArray[np.int32] | None = None  # [outputs, k]
    top_logprobs: NDArray[np.float32] | None = None  # [outputs, k]
    logits: NDArray[np.float32] | None = None  # [outputs, vocabulary]
    refusal: Refusal | None = None
    forced: list[int] = field(default_factory=list)  # by the grammar, after the last token
    scores: TokenScores | None = None  # of the opening's tokens after those that this row computed
    hidden: NDArray[np.float32] | None = None  # [hidden], with OutputMode.HIDDEN


class RowResults(StepTable[RowResult]):
    """One result for each row of a step. Those of rows that only decode have no objects of their own."""

    __slots__ = ("kv_lengths", "tokens")

    def __init__(self, rows: int) -> None:
        """All results are empty."""
        super().__init__({})
        self.kv_lengths = [0] * rows
        self.tokens: list[Sequence[int]] = [()] * rows

    def __len__(self) -> int:
        return len(self.kv_lengths)

    def _row_of_columns(self, index: int) -> RowResult:
        return RowResult(self.kv_lengths[index], 0, list(self.tokens[index]))

    def __setitem__(self, index: int, result: RowResult) -> None:
        """Set a result that has more than a length and tokens."""
        self.kv_lengths[index], self.tokens[index] = result.kv_length, result.tokens
        self.others[index] = result


@dataclass(frozen=True, slots=True)
class CacheView:
    """The state of one cache, for GetCaches."""

    cache_id: int
    kv_length: int
    pending: TokenIds
    prompt_length: int
    pages: int


@dataclass(slots=True)
class OpResult:
    """The result of one op: the KV length after a truncate or fork, or the number of caches released."""

    kv_length: int = 0
    released: int = 0
    refusal: Refusal | None = None


@dataclass(slots=True)
class StepResult:
    """The result of a step; `rows` has the results of the rows, then those of the openings."""

    ops: list[OpResult]
    rows: RowResults
    free_pages: int
    evictable_pages: int
    queue_us: int = 0  # from its arrival until it had the device
    compute_us: int = 0  # for which it had the device
