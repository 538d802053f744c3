"""`DecodeRows`: the rows of a step that only decode, by column."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from executor_service.backends.base import ForwardRow
from executor_service.backends.forward_rows import RowColumns
from executor_service.cache.sequence import CachedSequence
from executor_service.contract.plan import OutputMode
from executor_service.steps.accepted_row import AcceptedRow

_NOBODY = -1  # in `follows`: the row's token is known


class DecodeRows:
    """Rows whose pages are reserved, and that feed one token, draw one, and want nothing else.

    They are most rows of most steps, and an object for each would cost more than all else that is done for
    them. A row is at the same index in all columns, and in the step's launch, where they come first.
    """

    __slots__ = ("follows", "indices", "sequences", "starts")

    def __init__(self) -> None:
        self.indices: list[int] = []  # in the step's results
        self.sequences: list[CachedSequence] = []
        self.starts: list[int] = []  # KV lengths before the rows
        self.follows: list[int] = []  # as `AcceptedRow.follows`

    def __len__(self) -> int:
        return len(self.indices)

    def extend(
        self, first_index: int, sequences: Sequence[CachedSequence], starts: list[int], follows: list[int]
    ) -> None:
        """Add rows at the end, whose indices are `first_index` and those after it."""
        self.indices.extend(range(first_index, first_index + len(sequences)))
        self.sequences.extend(sequences)
        self.starts.extend(starts)
        self.follows.extend(follows)

    def accepted_row(self, place: int) -> AcceptedRow:
        """The row at this index as an object, for what is rare."""
        start = self.starts[place]
        row = AcceptedRow(
            self.indices[place], self.sequences[place], start, 1, start + 1, start + 1, OutputMode.SAMPLE, 0
        )
        row.outputs, row.follows = 1, self.follows[place]
        return row

    def columns(self) -> RowColumns:
        """What a backend has to know of them, by column."""
        ones = np.ones(len(self), np.int32)
        tokens = [
            sequence.ids.item(start) if follows == _NOBODY else 0
            for sequence, start, follows in zip(self.sequences, self.starts, self.follows, strict=True)
        ]
        # One list makes an array in half the time of three.
        numbers = np.array([*self.starts, *self.follows, *tokens], np.int32)
        starts, follows, tokens_fed = numbers.reshape(3, -1)
        return RowColumns(
            starts=starts,
            counts=ones,
            outputs=ones,
            follows=follows,
            slacks=np.zeros(len(self), np.int32),  # none of them follows one with drafts
            tokens=tokens_fed,
            tables=[sequence.table.pages() for sequence in self.sequences],
            samplings=[sequence.sampling for sequence in self.sequences],
        )

    def forward_rows(self) -> list[ForwardRow]:
        """The same as objects."""
        made = []
        for sequence, start, follows in zip(self.sequences, self.starts, self.follows, strict=True):
            history = sequence.ids[: start + 1]
            made.append(
                ForwardRow(
                    start=start,
                    tokens=history[start:],
                    history=history,
                    prompt_length=sequence.prompt_length,
                    block_table=sequence.table.pages(),
                    outputs=1,
                    output=OutputMode.SAMPLE,
                    sampling=sequence.sampling,
                    salt=sequence.salt,
                    follows=follows,
                )
            )
        return made
