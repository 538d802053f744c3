"""`OpenDrafts`: the unanswered drafts of one sequence, and where its unanswered rows are likely to end."""

from __future__ import annotations

from collections.abc import Sequence


class OpenDrafts:
    """The unanswered rows that have drafts, in the order of sending, among all unanswered rows."""

    __slots__ = ("_rows", "count")

    def __init__(self) -> None:
        self._rows: list[tuple[int, tuple[int, ...]]] = []  # unanswered rows before it, its drafts
        self.count = 0  # drafts

    def send(self, before: int, drafts: tuple[int, ...]) -> None:
        """A row with drafts is sent; `before`: unanswered rows before it."""
        self._rows.append((before, drafts))
        self.count += len(drafts)

    def answer(self) -> None:
        """The oldest unanswered row, which may have none, is answered."""
        if self._rows and not self._rows[0][0]:
            self.count -= len(self._rows.pop(0)[1])
        self._rows = [(before - 1, drafts) for before, drafts in self._rows]

    def expected(self, tokens: Sequence[int], rows: int) -> int:
        """How many of the sequence's next tokens `rows` unanswered rows add, if the next ones are these.

        tokens: at least `rows` + `count`.
        """
        added = done = 0
        for before, drafts in self._rows:
            added += before - done
            for draft in drafts:
                if draft != tokens[added]:
                    break
                added += 1
            added += 1
            done = before + 1
        return added + rows - done
