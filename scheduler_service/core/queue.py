"""Sequences in the order of their keys."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterator
from operator import attrgetter

from scheduler_service.core.sequence import LiveSequence

_key = attrgetter("key")


class SequenceQueue:
    """A sorted list: adding and removing take a binary search and a move of the items after it."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items: list[LiveSequence] = []

    def add(self, sequence: LiveSequence) -> None:
        """Insert a sequence, which must not be here already."""
        insort(self._items, sequence, key=_key)

    def remove(self, sequence: LiveSequence) -> None:
        """Remove a sequence. Raises KeyError if it is not here."""
        at = bisect_left(self._items, sequence.key, key=_key)
        if at == len(self._items) or self._items[at] is not sequence:
            raise KeyError(sequence.key)
        del self._items[at]

    def discard(self, sequence: LiveSequence) -> None:
        """Remove a sequence if it is here."""
        if sequence in self:
            self.remove(sequence)

    def first(self, passed: Container[bytes]) -> LiveSequence | None:
        """The first sequence whose adapter is not one of `passed`; of each request one is looked at."""
        items, at = self._items, 0
        while at < len(items):
            live = items[at].live
            if live.request.adapter not in passed:
                return items[at]
            at += 1
            if (count := len(live.sequences)) > 1:
                last = (*live.sequences[0].key[:-1], count)
                at = bisect_left(items, last, at, key=_key)
        return None

    def position(self, sequence: LiveSequence) -> int:
        """How many sequences are before this one, which is here, and itself: the first has 1."""
        return bisect_left(self._items, sequence.key, key=_key) + 1

    def like_the_first(self) -> int:
        """How many sequences have the priority of the first, itself included."""
        rank, priority = self._items[0].key[:2]
        return bisect_left(self._items, (rank, priority + 1), key=_key)

    def __contains__(self, sequence: LiveSequence) -> bool:
        at = bisect_left(self._items, sequence.key, key=_key)
        return at < len(self._items) and self._items[at] is sequence

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[LiveSequence]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[LiveSequence]:
        return reversed(self._items)

    def __getitem__(self, at: int) -> LiveSequence:
        return self._items[at]
