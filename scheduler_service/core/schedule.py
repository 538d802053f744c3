"""The items of a step that is being filled (rows, openings, forks), and its remaining tokens and pages.

An item names its sequence, and the tokens and pages that it takes. A sequence changes when the step is sent,
not when its row is scheduled: so dropping the item undoes it completely.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import ClassVar

from scheduler_service.core.request import DraftSource
from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.step import CacheFork, CacheOpening, CacheRow, RowMode


class ScheduledRow(CacheRow):
    """A row of the step, with its sequence and the pages reserved for it.

    `source`: of its drafts; set where it has some.
    """

    __slots__ = ("pages", "sequence", "source")

    source: DraftSource

    def __init__(
        self,
        sequence: LiveSequence,
        kv_length: int,
        pages: int,
        limit: int = 0,
        tokens: tuple[int, ...] = (),
        mode: RowMode = RowMode.SAMPLE,
    ) -> None:
        self.sequence = sequence
        self.cache_id = sequence.cache_id
        self.kv_length = kv_length
        self.pages = pages  # set aside for it
        self.limit = limit
        self.tokens = tokens
        self.drafts = ()
        self.steps = 1
        self.mode = mode
        self.is_bound = False

    @property
    def fed(self) -> int:
        """Tokens that the row feeds."""
        return (self.limit or 1) + len(self.drafts)


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledOpening(CacheOpening):
    """A cache that the step opens, with its sequence."""

    kv_length: ClassVar[int] = 0
    drafts: ClassVar[tuple[int, ...]] = ()

    sequence: LiveSequence = field(kw_only=True)


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledFork(CacheFork):
    """A cache that the step makes as a copy, with its sequence, which has a row in the step as well."""

    sequence: LiveSequence


class Schedule:
    """The items of one step."""

    def __init__(self, tokens: int, pages: int, output_bytes: int = 0) -> None:
        """tokens: that the step may feed. pages: that it may take. output_bytes: of scores and vectors."""
        self.tokens_left = tokens
        self.pages_left = pages
        self.bytes_left = output_bytes
        self.rows: list[ScheduledRow] = []
        self.openings: list[ScheduledOpening] = []
        self.forks: list[ScheduledFork] = []
        self._new_or_copied: set[LiveSequence] = set()

    @property
    def empty(self) -> bool:
        """There is no row and no opening."""
        return not self.rows and not self.openings

    def add_row(self, row: ScheduledRow) -> None:
        """Schedule a row."""
        self.rows.append(row)
        self.tokens_left -= row.fed
        self.pages_left -= row.pages

    def add_opening(self, opening: ScheduledOpening, pages: int) -> None:
        """Schedule an opening, and reserve pages for all its chunks, those of later steps included."""
        self.openings.append(opening)
        self._new_or_copied.add(opening.sequence)
        self.tokens_left -= opening.limit
        self.pages_left -= pages

    def add_fork(self, fork: ScheduledFork, source: LiveSequence, row: ScheduledRow) -> None:
        """Schedule a copy of the source's cache, and the first row of the copy."""
        self.forks.append(fork)
        self._new_or_copied |= {fork.sequence, source}
        self.add_row(row)

    def add_drafts(self, row: ScheduledRow, drafts: tuple[int, ...], source: DraftSource, pages: int) -> None:
        """Give drafts to a scheduled row that has none, and reserve `pages` more for them."""
        row.drafts, row.source = drafts, source
        row.pages += pages
        self.tokens_left -= len(drafts)
        self.pages_left -= pages

    def opens_or_copies(self, sequence: LiveSequence) -> bool:
        """The step opens or copies the sequence's cache, so it can't preempt the sequence."""
        return sequence in self._new_or_copied

    def drop(self, sequences: Container[LiveSequence]) -> None:
        """Remove the rows of these sequences; their tokens and pages are available again."""
        kept = []
        for row in self.rows:
            if row.sequence in sequences:
                self.tokens_left += row.fed
                self.pages_left += row.pages
            else:
                kept.append(row)
        self.rows = kept
