"""The executor's slots for adapters: which are used, and which queued sequences wait for one.

The adapter of a sequence with a cache has a slot. A sequence of another adapter than those waits while all
slots are used, and sequences after it may start before it. So that it does not wait forever, each adapter in
a slot may start only MAX_OVERTAKINGS sequences queued after a waiting one. Then it starts none until its
slot was free, if a waiting adapter needs that slot. Sequences without an adapter take no slot.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_OVERTAKINGS = 16
"""Sequences that one adapter in a slot starts before another adapter's sequence that waits for a slot."""


class UsedSlots:
    """The adapters (fingerprints) of sequences with a cache. b"" stands for none, and is not counted."""

    def __init__(self) -> None:
        self.sequences: dict[bytes, int] = {}  # with a cache, by adapter; in the order of getting a slot
        self._overtakings: dict[bytes, int] = {}  # since the adapter has its slot

    def __len__(self) -> int:
        return len(self.sequences)

    def hold(self, adapter: bytes) -> None:
        """Count one more sequence with a cache."""
        if adapter:
            self.sequences[adapter] = self.sequences.get(adapter, 0) + 1

    def drop(self, adapter: bytes) -> None:
        """Count one sequence less; without sequences the adapter's slot is free."""
        if adapter:
            self.sequences[adapter] -= 1
            if not self.sequences[adapter]:
                del self.sequences[adapter]
                self._overtakings.pop(adapter, None)

    def overtake(self, adapter: bytes) -> None:
        """Count a sequence of an adapter in a slot that started before one that waits for a slot."""
        if adapter:
            self._overtakings[adapter] = self._overtakings.get(adapter, 0) + 1

    def to_yield(self, passed: set[bytes]) -> bytes:
        """An adapter that has overtaken too often: it must start no sequence until its slot has been free.

        Of several such adapters, the one with the fewest sequences; b"" if there is none. Never one of
        `passed`, of which the plan starts no sequence anyway.
        """
        spent = [
            adapter
            for adapter, overtakings in self._overtakings.items()
            if overtakings >= MAX_OVERTAKINGS and adapter not in passed
        ]
        return min(spent, key=self.sequences.__getitem__, default=b"")

    def check_integrity(self, adapters: Iterable[bytes]) -> None:
        """Compare with the adapters of all sequences with a cache. Raises AssertionError."""
        counts: dict[bytes, int] = {}
        for adapter in adapters:
            if adapter:
                counts[adapter] = counts.get(adapter, 0) + 1
        assert self.sequences == counts, "sequences are miscounted by adapter"
        assert self._overtakings.keys() <= counts.keys(), "an adapter without a slot has overtaken others"


class SlotTurns:
    """Decides for one plan, in the order of turns, which adapters' sequences may start."""

    def __init__(self, used: UsedSlots, slots: int) -> None:
        """slots: the adapters that sequences may have at once."""
        self._used, self._slots = used, slots
        self.passed: set[bytes] = set()
        """Adapters of which the plan starts no further sequence."""
        self._waits = False  # a sequence that waits for a slot comes before those asked for from now on

    def admits(self, adapter: bytes) -> bool:
        """Whether the sequence whose turn it is may start; if not, its adapter is one of `passed` now."""
        if not adapter or adapter in self._used.sequences or len(self._used) < self._slots:
            return True
        self.passed.add(adapter)
        self._waits = True
        if yielding := self._used.to_yield(self.passed):
            self.passed.add(yielding)
        return False

    def started(self, adapter: bytes) -> None:
        """The sequence that was admitted last has started."""
        if self._waits:
            self._used.overtake(adapter)
