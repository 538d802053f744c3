"""`ReplayBudget`: the time that replays of outputs may take in a step; `ReplayAccount`: one replay's part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

_PIECE = 2  # tokens consumed between two looks at the clock; in hostile grammars one takes up to 30 ms
_MIN_S = 0.0005  # with less left, no replay goes on


class ReplayBudget:
    """CPU time of the device thread, which owns it; a process that is stopped meanwhile spends nothing."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock`: in seconds; None: there is no limit."""
        self.clock = clock
        self.left_s = math.inf if clock is None else 0.0

    def renew(self, seconds: float) -> None:
        """Allow as much from now on."""
        if self.clock is not None:
            self.left_s = seconds


class ReplayAccount:
    """One replay's part of a budget: each time half of what those before it have left.

    So those after it go on, too. What its last piece took beyond that, it saves up for before the next one.
    """

    def __init__(self, budget: ReplayBudget) -> None:
        self._budget = budget
        self._owed_s = 0.0

    def pieces(self, tokens: int) -> Iterator[int]:
        """Numbers of tokens, `tokens` in all, to replay one after another; fewer where time runs out.

        What happens between two of them is what the replay takes.
        """
        budget, clock = self._budget, self._budget.clock
        if clock is None:
            if tokens:
                yield tokens
            return
        left_s = -self._owed_s
        if budget.left_s > _MIN_S:
            left_s += budget.left_s / 2
        self._owed_s = max(-left_s, 0.0)
        while tokens and left_s > 0:
            size = min(_PIECE, tokens)
            began_s = clock()
            try:
                yield size
            finally:
                spent_s = clock() - began_s
                budget.left_s -= spent_s
                left_s -= spent_s
                self._owed_s = max(-left_s, 0.0)
            tokens -= size
