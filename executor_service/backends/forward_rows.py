"""The rows of one forward and their outputs: `ForwardRows` and `ForwardOutputs`, most of them by columns.

A backend that packs rows into arrays takes the columns of the rows that only decode. Any other backend uses
these types as what they also are: sequences of `ForwardRow` and `RowOutput`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from executor_service.contract.masks import Masks
from executor_service.contract.plan import (
    NO_TOKENS,
    OutputMode,
    Refusal,
    Sampling,
    TokenIds,
    TokenScores,
)
from executor_service.contract.step_table import StepTable

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PromptOutputs:
    """What a row returns beside its output positions; few rows have any of it.

    targets[i] is the token at position `first` + i of the sequence: the row returns how likely it is by the
    raw logits of position first + i - 1, which is one of the row's, and as many alternatives as
    `sampling.logprobs` says.
    """

    first: int = 0
    targets: TokenIds = field(default_factory=lambda: NO_TOKENS)
    last: bool = False  # return the last token's hidden state
    total: bool = False  # return the sum of all tokens' hidden states


HIDDEN_UNIT = 2.0**-30
"""Hidden states are rounded to multiples of this before they are summed.

Sums of such numbers are exact in fp64 (up to 2^23 in all), so that a sum does not depend on its order, nor
on how a prompt is cut into rows.
"""


# Read-only, but not frozen: a frozen one takes 1.4 µs longer to make, 0.4 ms in a step of 256 rows.
@dataclass(slots=True)
class ForwardRow:
    """One sequence's part of a forward: q input tokens at positions start .. start + q - 1.

    KV of token i goes to page `block_table[(start + i) // page_size]`, slot
    `(start + i) % page_size`; KV of the positions before `start` is read from the same table. The last
    `outputs` positions (0 to q) give outputs, in the form that `output` names. The output of position p is
    the token at index p + 1 of the sequence: its noise is keyed by (seed, p + 1, id), and its penalties
    count history[: p + 1]. A row with OutputMode.HIDDEN has none: its `prompt` says what it returns.

    A row that samples at several positions verifies drafts: its last `outputs` - 1 tokens. Accepted is the
    longest prefix of them that equals the tokens sampled in their places.

    With `follows` >= 0 the host does not know the row's first input token yet: it is the last one that row
    `follows` of the previous launch emits, the token after the drafts that it accepts. Where that row has
    drafts, `start` is not known either, but as if all were accepted: it is up to `slack` tokens lower. So are
    then all positions of the row, whose KV lies where these say. Of `history` all that the previous launch
    feeds or samples is a placeholder; penalties count what is there all the same.

    With `masks`, which only rows have that sample, each output is a token that its mask allows; every mask
    allows at least one. A row that is `masked_later` follows another, and gets its masks from
    `PendingForward.constrain`, when that row's tokens are known.

    Rows of different adapters and of none are in one forward, and none of them depends on the others. A slot
    holds what `AdapterBackend.load_adapter` brought there last.
    """

    start: int  # with `slack` an upper bound
    tokens: TokenIds  # [q], q >= 1
    history: TokenIds  # [start + q]: the sequence, ending with `tokens`
    prompt_length: int  # history[prompt_length:] is output
    block_table: NDArray[np.int32]  # page numbers for at least start + q tokens
    outputs: int
    output: OutputMode
    sampling: Sampling
    top_k: int = 0  # for OutputMode.TOP_K
    salt: bytes = b""
    follows: int = -1
    masks: Masks | None = None  # [outputs, bytes]
    masked_later: bool = False
    slot: int = -1  # of the adapter that changes the model for this row; -1: none
    prompt: PromptOutputs | None = None
    slack: int = 0  # drafts of the row that it follows


@dataclass(slots=True)
class RowOutput:
    """One row's outputs, in the order of its positions.

    `finite` is False when any of the row's output logits (before masks and bias), or of what its `prompt`
    asks for, was NaN or infinite, or when the row has no output, which `refusal` explains; the other fields
    are then unset. Logprobs are log-softmax of the raw logits.
    """

    tokens: TokenIds | None = None  # SAMPLE: [outputs]
    logprobs: NDArray[np.float32] | None = None  # SAMPLE with sampling.logprobs: [outputs]
    top_ids: NDArray[np.int32] | None = None  # TOP_K, or SAMPLE with logprobs >= 1: [outputs, k]
    top_logprobs: NDArray[np.float32] | None = None  # the same shape
    logits: NDArray[np.float32] | None = None  # FULL: [outputs, vocabulary]
    finite: bool = True
    scores: TokenScores | None = None  # of prompt.targets, if there are any
    hidden: NDArray[np.float32] | None = None  # prompt.last: [hidden]
    hidden_sum: NDArray[np.float64] | None = None  # prompt.total: [hidden], in multiples of HIDDEN_UNIT
    refusal: Refusal | None = None  # with `finite` False; None: the logits were NaN or infinite


class RowColumns(NamedTuple):
    """Fields of `ForwardRow`, by column; [rows] each, but for `tokens`."""

    starts: Ints
    counts: Ints  # tokens of each row
    outputs: Ints
    follows: Ints
    slacks: Ints
    tokens: TokenIds  # [tokens], row after row
    tables: list[Ints]  # block tables, with no more pages than the rows' tokens need
    samplings: list[Sampling]

    @classmethod
    def of(cls, rows: Sequence[ForwardRow], page_size: int) -> RowColumns:
        """Those of rows that are objects."""
        return cls(
            np.array([row.start for row in rows], np.int32),
            np.array([len(row.tokens) for row in rows], np.int32),
            np.array([row.outputs for row in rows], np.int32),
            np.array([row.follows for row in rows], np.int32),
            np.array([row.slack for row in rows], np.int32),
            np.concatenate([row.tokens for row in rows]),
            [row.block_table[: -(-(row.start + len(row.tokens)) // page_size)] for row in rows],
            [row.sampling for row in rows],
        )

    def __add__(self, more: RowColumns) -> RowColumns:  # type: ignore[override]
        """Those of these rows and then of more."""
        return RowColumns(
            np.concatenate([self.starts, more.starts]),
            np.concatenate([self.counts, more.counts]),
            np.concatenate([self.outputs, more.outputs]),
            np.concatenate([self.follows, more.follows]),
            np.concatenate([self.slacks, more.slacks]),
            np.concatenate([self.tokens, more.tokens]),
            self.tables + more.tables,
            self.samplings + more.samplings,
        )


class Decodes(Protocol):
    """Rows that each feed one token and draw one, as `Sampling.only_draws` says; OutputMode.SAMPLE."""

    def __len__(self) -> int: ...

    def columns(self) -> RowColumns:
        """Their columns."""

    def forward_rows(self) -> Iterable[ForwardRow]:
        """The same as objects."""


class ForwardRows(StepTable[ForwardRow]):
    """The rows of one forward: those that only decode, then `others`. Valid until the launch returns."""

    def __init__(self, others: Iterable[ForwardRow], decodes: Decodes | None = None) -> None:
        self._decodes = decodes
        self.decodes = 0 if decodes is None else len(decodes)  # rows that only decode
        super().__init__(dict(enumerate(others, self.decodes)))

    def __len__(self) -> int:
        return self.decodes + len(self.others)

    def _row_of_columns(self, index: int) -> ForwardRow:
        return self._objects[index]

    @cached_property
    def _objects(self) -> list[ForwardRow]:
        return [] if self._decodes is None else list(self._decodes.forward_rows())

    def columns(self, page_size: int) -> RowColumns:
        """The columns of all rows, in their order; there is one row at least."""
        if self._decodes is None or not self.decodes:
            return RowColumns.of(list(self.others.values()), page_size)
        columns = self._decodes.columns()
        if not self.others:
            return columns
        return columns + RowColumns.of(list(self.others.values()), page_size)


class ForwardOutputs(StepTable[RowOutput]):
    """The outputs of `ForwardRows`: those of rows that only decode, then `others`."""

    __slots__ = ("not_finite", "tokens")

    def __init__(
        self, tokens: list[int], not_finite: dict[int, Refusal | None], others: dict[int, RowOutput]
    ) -> None:
        """tokens [decodes]; not_finite: by index, decodes without an output, and why, where it is known."""
        super().__init__(others)
        self.tokens, self.not_finite = tokens, not_finite

    @classmethod
    def of(cls, outputs: Sequence[RowOutput], decodes: int = 0) -> ForwardOutputs:
        """The same outputs, the first `decodes` by columns. Raises RuntimeError if one has not one token."""
        tokens, not_finite = [], {}
        for index, output in enumerate(outputs[:decodes]):
            if not output.finite:
                not_finite[index] = output.refusal
                tokens.append(0)
                continue
            given = 0 if output.tokens is None else len(output.tokens)
            if output.tokens is None or given != 1:
                raise RuntimeError(f"the backend gave {given} tokens for 1 output position")
            tokens.append(output.tokens.item())
        return cls(tokens, not_finite, dict(enumerate(outputs[decodes:], decodes)))

    def __len__(self) -> int:
        return len(self.tokens) + len(self.others)

    def _row_of_columns(self, index: int) -> RowOutput:
        if index in self.not_finite:
            return RowOutput(finite=False, refusal=self.not_finite[index])
        return RowOutput(np.array([self.tokens[index]], np.int32))
