"""One step in the making: an item for each row, opening and fork, and what is left of its tokens and pages.

An item says whose it is and what it takes. Nothing about a sequence changes when its row is scheduled, only
when the step is sent: so dropping the item is the whole undo.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.step import CacheFork, CacheOpening, CacheRow


class ScheduledRow(CacheRow):
    """A row of this step."""

    __slots__ = ("pages", "sequence")

    def __init__(
        self, sequence: LiveSequence, kv_length: int, pages: int, limit: int = 0, tokens: tuple[int, ...] = ()
    ) -> None:
        self.sequence = sequence
        self.cache_id = sequence.cache_id
        self.kv_length = kv_length
        self.pages = pages  # set aside for it
        self.limit = limit
        self.tokens = tokens
        self.drafts = ()
        self.steps = 1

    @property
    def fed(self) -> int:
        """Tokens that the step computes for it."""
        return (self.limit or 1) + len(self.drafts)


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledOpening(CacheOpening):
    """A cache that this step opens."""

    kv_length: ClassVar[int] = 0
    drafts: ClassVar[tuple[int, ...]] = ()

    sequence: LiveSequence


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledFork(CacheFork):
    """A cache that this step copies; the copy has a row as well."""

    sequence: LiveSequence


class Schedule:
    """The items of one step."""

    def __init__(self, tokens: int, pages: int) -> None:
        """tokens: that the step may compute. pages: that it may take."""
        self.tokens_left = tokens
        self.pages_left = pages
        self.rows: list[ScheduledRow] = []
        self.openings: list[ScheduledOpening] = []
        self.forks: list[ScheduledFork] = []
        self._new_or_copied: set[LiveSequence] = set()

    @property
    def empty(self) -> bool:
        """Nothing is computed by it."""
        return not self.rows and not self.openings

    def add_row(self, row: ScheduledRow) -> None:
        """Schedule a row."""
        self.rows.append(row)
        self.tokens_left -= row.fed
        self.pages_left -= row.pages

    def add_opening(self, opening: ScheduledOpening, pages: int) -> None:
        """Schedule an opening, with pages for all that it will compute in this step and later."""
        self.openings.append(opening)
        self._new_or_copied.add(opening.sequence)
        self.tokens_left -= opening.limit
        self.pages_left -= pages

    def add_fork(self, fork: ScheduledFork, source: LiveSequence, row: ScheduledRow) -> None:
        """Schedule a copy of the source's cache, and the copy's first row."""
        self.forks.append(fork)
        self._new_or_copied |= {fork.sequence, source}
        self.add_row(row)

    def add_drafts(self, row: ScheduledRow, drafts: tuple[int, ...], pages: int) -> None:
        """Let a scheduled row verify drafts, which take so many pages more."""
        row.drafts = drafts
        row.pages += pages
        self.tokens_left -= len(drafts)
        self.pages_left -= pages

    def opens_or_copies(self, sequence: LiveSequence) -> bool:
        """The sequence's cache is opened by this step, or copied by it: it can't be taken away in it."""
        return sequence in self._new_or_copied

    def drop(self, sequences: Container[LiveSequence]) -> None:
        """Take the rows of these out again, and have their tokens and pages back."""
        kept = []
        for row in self.rows:
            if row.sequence in sequences:
                self.tokens_left += row.fed
                self.pages_left += row.pages
            else:
                kept.append(row)
        self.rows = kept
