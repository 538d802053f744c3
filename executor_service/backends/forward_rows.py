"""`ForwardRows` and `ForwardOutputs`: the rows of one forward and their outputs, most of them by columns.

In most steps most rows only decode: each feeds one token, draws the next, and wants nothing else. The engine
keeps no object for such a row, and a backend that packs rows into arrays needs none: it takes their columns.
Any other backend uses these types as what they also are: sequences of `ForwardRow` and `RowOutput`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.contract.plan import Refusal, Sampling, TokenIds

Ints = NDArray[np.int32]


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


class Decodes(Protocol):
    """Rows that each feed one token and draw one, as `Sampling.only_draws` says; OutputMode.SAMPLE."""

    def __len__(self) -> int: ...

    def columns(self) -> RowColumns:
        """Their columns."""

    def forward_rows(self) -> Iterable[ForwardRow]:
        """The same as objects."""


class ForwardRows(Sequence[ForwardRow]):
    """The rows of one forward: `decodes`, then `others`. Valid until the launch returns."""

    def __init__(self, decodes: Decodes, others: list[ForwardRow]) -> None:
        self.decodes, self.others = decodes, others

    def __len__(self) -> int:
        return len(self.decodes) + len(self.others)

    @overload
    def __getitem__(self, index: int) -> ForwardRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[ForwardRow]: ...
    def __getitem__(self, index: int | slice) -> ForwardRow | list[ForwardRow]:
        if isinstance(index, int) and index >= len(self.decodes):
            return self.others[index - len(self.decodes)]
        return self._all[index]

    @cached_property
    def _all(self) -> list[ForwardRow]:
        return [*self.decodes.forward_rows(), *self.others]


class ForwardOutputs(Sequence[RowOutput]):
    """The outputs of `ForwardRows`: those of its decodes by columns, then `others`."""

    def __init__(self, tokens: TokenIds, finite: NDArray[np.bool_], others: list[RowOutput]) -> None:
        """tokens, finite: [decodes]."""
        self.tokens, self.finite, self.others = tokens, finite, others

    def __len__(self) -> int:
        return len(self.tokens) + len(self.others)

    @overload
    def __getitem__(self, index: int) -> RowOutput: ...
    @overload
    def __getitem__(self, index: slice) -> list[RowOutput]: ...
    def __getitem__(self, index: int | slice) -> RowOutput | list[RowOutput]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        if index >= len(self.tokens):
            return self.others[index - len(self.tokens)]
        return RowOutput(self.tokens[index : index + 1]) if self.finite[index] else RowOutput(finite=False)

    def __setitem__(self, index: int, output: RowOutput) -> None:
        """Replace one of `others`; `index` is among all."""
        self.others[index - len(self.tokens)] = output


def columns_of(rows: Sequence[ForwardRow], page_size: int) -> RowColumns:
    """The columns of all rows, in their order."""
    if not isinstance(rows, ForwardRows):
        return _columns(rows, page_size)
    decodes = rows.decodes.columns()
    if not rows.others:
        return decodes
    others = _columns(rows.others, page_size)
    return RowColumns(
        np.concatenate([decodes.starts, others.starts]),
        np.concatenate([decodes.counts, others.counts]),
        np.concatenate([decodes.outputs, others.outputs]),
        np.concatenate([decodes.follows, others.follows]),
        np.concatenate([decodes.slacks, others.slacks]),
        np.concatenate([decodes.tokens, others.tokens]),
        decodes.tables + others.tables,
        decodes.samplings + others.samplings,
    )


def others_of(rows: Sequence[ForwardRow]) -> Sequence[ForwardRow]:
    """The rows that do not only decode, which come last."""
    return rows.others if isinstance(rows, ForwardRows) else rows


def drawn_by(outputs: Sequence[RowOutput], decodes: int) -> tuple[list[int], dict[int, Refusal | None]]:
    """The tokens of the first `decodes` outputs, and the refusals, if any, of those that are not finite.

    Raises RuntimeError if an output has another number of tokens.
    """
    if isinstance(outputs, ForwardOutputs):
        bad = [] if outputs.finite.all() else np.flatnonzero(~outputs.finite).tolist()
        return outputs.tokens.tolist(), dict.fromkeys(bad)
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
    return tokens, not_finite


def other_outputs(outputs: Sequence[RowOutput], decodes: int) -> Sequence[RowOutput]:
    """The outputs after the first `decodes`."""
    return outputs.others if isinstance(outputs, ForwardOutputs) else outputs[decodes:]


def _columns(rows: Sequence[ForwardRow], page_size: int) -> RowColumns:
    return RowColumns(
        np.array([row.start for row in rows], np.int32),
        np.array([len(row.tokens) for row in rows], np.int32),
        np.array([row.outputs for row in rows], np.int32),
        np.array([row.follows for row in rows], np.int32),
        np.array([row.slack for row in rows], np.int32),
        np.concatenate([row.tokens for row in rows]),
        [row.block_table[: -(-(row.start + len(row.tokens)) // page_size)] for row in rows],
        [row.sampling for row in rows],
    )
