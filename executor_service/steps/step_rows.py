"""The rows of one step, between their reservation and their commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, count

from executor_service.cache.sequence import CachedSequence
from executor_service.cache.sequence_store import SequenceStore
from executor_service.cache.session import ClientSession
from executor_service.contract.plan import Reason, Refusal, Row, RowResult, RowResults, StepPlan
from executor_service.steps.accepted_row import AcceptedRow
from executor_service.steps.decode_rows import DecodeRows

_EXHAUSTED = frozenset((Reason.PAGES, Reason.SEQUENCES, Reason.ADAPTER_SLOTS))


@dataclass(slots=True)
class StepRows:
    """The rows of a step: those that were accepted, and one result for each, refused ones included.

    An accepted row's result is empty until the commit.
    """

    session: ClientSession
    plan: StepPlan
    accepted: list[AcceptedRow]  # in the order of their launch, after `decodes`: rows, then openings
    results: RowResults
    decodes: DecodeRows = field(default_factory=DecodeRows)  # rows that only decode
    tokens: int = 0  # upper bound of the tokens to compute
    steps: int = 1  # maximum over the rows
    masked_later: bool = False  # some row gets its mask when the step ahead is finished
    mispredicted: set[CachedSequence] = field(default_factory=set)  # whose rows were refused in flight
    _places: dict[CachedSequence, int] | None = field(default=None, repr=False)

    @property
    def sequences(self) -> Iterator[CachedSequence]:
        """Those of the accepted rows, in the order of their launch."""
        return chain(self.decodes.sequences, (row.sequence for row in self.accepted))

    @property
    def has_refusals(self) -> bool:
        """Whether any row was refused for what a step in flight may change."""
        refusals = (result.refusal for result in self.results.others.values())
        return any(r is not None and r.reason is not Reason.GRAMMAR_BEHIND for r in refusals)

    @property
    def lacks_memory(self) -> bool:
        """Whether a row was refused because pages, sequences or slots of adapters had run out."""
        refusals = (result.refusal for result in self.results.others.values())
        return any(r is not None and r.reason in _EXHAUSTED for r in refusals)

    def needs_several(self, max_piece_tokens: int) -> bool:
        """Whether the rows need more than one forward of at most `max_piece_tokens` tokens."""
        return self.steps > 1 or self.tokens > max_piece_tokens

    @property
    def places(self) -> Mapping[CachedSequence, int]:
        """The index of each sequence's row in the launch."""
        if self._places is None:
            self._places = dict(zip(self.sequences, count()))
        return self._places

    def row_at(self, index: int) -> AcceptedRow:
        """The row at this index of the launch; one of `decodes` is made an object, which is a copy."""
        decodes = len(self.decodes)
        return self.decodes.accepted_row(index) if index < decodes else self.accepted[index - decodes]

    def row_of(self, sequence: CachedSequence) -> AcceptedRow | None:
        """The same for the sequence's row, if it has one."""
        index = self.places.get(sequence)
        return None if index is None else self.row_at(index)

    def make_objects(self) -> None:
        """Move the rows of `decodes` to the front of `accepted`."""
        self.accepted[:0] = [self.decodes.accepted_row(place) for place in range(len(self.decodes))]
        self.decodes = DecodeRows()

    def undo(self, store: SequenceStore) -> None:
        """Undo the reservation of all rows; none of them is in flight."""
        for row in reversed(self.accepted):
            undo_row(row, row.begin, self.session, store)
        for sequence, start in zip(self.decodes.sequences, self.decodes.starts, strict=True):
            store.pages.cut(sequence.table, start)

    def refuse_followers(self, undone: Iterable[tuple[AcceptedRow, Refusal]]) -> None:
        """Refuse the rows that continue an undone row, whose undoing released their pages too.

        One that gave an upper bound of its length is refused as the undone one was.
        """
        for former, cause in undone:
            row = self.row_of(former.sequence)
            if row is None:
                continue
            request = self.plan.rows[row.index]
            assert isinstance(request, Row)
            self.mispredicted.add(row.sequence)
            if former.opened:
                refusal = unknown_cache(row.index, request)
            elif request.is_bound:
                refusal = cause
            else:
                refusal = unexpected_length(row.index, request, former.sequence.length)
            self.results[row.index] = RowResult(refusal=refusal)

    def refuse_late(self, row: AcceptedRow, refusal: Refusal, store: SequenceStore) -> None:
        """Refuse a row in flight, now that the one that it follows is committed; its output is dropped."""
        self.mispredicted.add(row.sequence)
        self.results[row.index] = RowResult(refusal=refusal)
        undo_row(row, row.begin, self.session, store)


def undo_row(row: AcceptedRow, length: int, session: ClientSession, store: SequenceStore) -> None:
    """Restore the row's sequence to `length` cached tokens; remove a sequence that the row opened."""
    sequence = row.sequence
    if row.overwritten >= 0:
        sequence.ids[length] = row.overwritten
    store.pages.cut(sequence.table, 0 if row.opened else length)
    if row.opened:
        store.take_back(session, row.opened)


def unknown_cache(index: int, row: Row) -> Refusal:
    """The refusal of a row whose cache does not exist."""
    return Refusal(Reason.CACHE, f"rows.cache_ids[{index}]: unknown or released cache {row.cache_id}")


def unexpected_length(index: int, row: Row, length: int) -> Refusal:
    """The refusal of a row that expects another KV length than `length`."""
    return Refusal(
        Reason.KV_LENGTH, f"rows.kv_lengths[{index}]: expected {row.kv_length}, is {length}", length
    )
