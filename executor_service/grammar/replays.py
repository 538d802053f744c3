"""`Replays`: automata of openings and forks that were refused, for when these are tried again.

The output of a sequence that is opened or forked is replayed through its grammar. Where that takes long, the
step only begins it. It goes on in later steps that ask again, and while the device thread has nothing else to
do.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from executor_service.contract.grammar import Grammar, GrammarStuck, ReplayUnfinished
from executor_service.contract.plan import TokenIds
from executor_service.grammar.automaton import Automaton
from executor_service.grammar.replay_budget import ReplayBudget

STEP_S = 1 / 128
"""Time for replays in a step; half of it for the first one. In a millisecond 300 tokens of JSON are read."""

_IDLE_S = STEP_S / 8  # at once, where there is nothing else to do
MAX_KEPT = 64  # automata, some kB each, at worst some 10 MB
_KEPT_S = 10.0  # after they were asked for; if others come, _REPEATED_S
_REPEATED_S = 1.0


@dataclass(slots=True)
class _Attempt:
    owner: object
    output: TokenIds  # that was asked for
    asked_s: float
    replayed_s: float = 0.0  # while there was nothing else to do


class Replays:
    """Replays that are not done, by automaton; those asked for last at the end. Device thread."""

    def __init__(
        self, clock: Callable[[], float] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock`: of the budget, as of `ReplayBudget`."""
        self.budget = ReplayBudget(clock)
        self._now = now
        self._kept: OrderedDict[Automaton, _Attempt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def begin_step(self) -> None:
        """Let replays take STEP_S from now on."""
        self.budget.renew(STEP_S)

    def automaton(self, owner: object, grammar: Grammar, output: TokenIds) -> Automaton:
        """An automaton for `output`: that of the owner's attempt with it or its beginning, or a new one.

        It is kept for the next attempt until it is `taken`, as far as there is room.
        """
        best, length = None, 0
        for automaton, attempt in self._kept.items():
            if len(attempt.output) > length and attempt.owner is owner and automaton.grammar == grammar:
                beginning = attempt.output
                if np.array_equal(output[: len(beginning)], beginning):
                    best, length = automaton, len(beginning)
        if best is None:
            best = Automaton(grammar, self.budget)
        self.keep(owner, best, output)
        return best

    def keep(self, owner: object, automaton: Automaton, output: TokenIds) -> None:
        """Keep an automaton of an output for the next attempt, unless there are too many.

        It takes the place of no attempt that is repeated: of many, the first ones are done first.
        """
        if not len(output):
            return  # there is nothing to replay
        if automaton not in self._kept and len(self._kept) >= MAX_KEPT:
            self._expire(_REPEATED_S)
            if len(self._kept) >= MAX_KEPT:
                return
        attempt = self._kept.setdefault(automaton, _Attempt(owner, output, 0.0))
        attempt.output, attempt.asked_s = output, self._now()
        self._kept.move_to_end(automaton)

    def taken(self, automaton: Automaton) -> None:
        """Forget an automaton: a sequence has it from now on."""
        self._kept.pop(automaton, None)

    def forget(self, owner: object) -> None:
        """Forget the attempts of an owner."""
        for automaton in [kept for kept, attempt in self._kept.items() if attempt.owner is owner]:
            del self._kept[automaton]

    def expire(self) -> None:
        """Forget the attempts that were not repeated for _KEPT_S seconds."""
        self._expire(_KEPT_S)

    def _expire(self, seconds: float) -> None:
        """Forget the attempts that were not repeated for this time."""
        while self._kept:
            automaton, attempt = next(iter(self._kept.items()))
            if self._now() - attempt.asked_s <= seconds:
                return
            del self._kept[automaton]

    @property
    def unfinished(self) -> bool:
        """Whether `go_on` has something to do."""
        return any(automaton.unfinished is not None for automaton in self._kept)

    def go_on(self) -> float:
        """Spend _IDLE_S on the replay on which least was spent so; returns the seconds that it took."""
        open_ = [each for each in self._kept.items() if each[0].unfinished is not None]
        if not open_:
            return 0.0
        automaton, attempt = min(open_, key=lambda each: each[1].replayed_s)
        assert automaton.unfinished is not None
        self.budget.renew(2 * _IDLE_S)
        with suppress(GrammarStuck, ReplayUnfinished):  # the next attempt raises it
            automaton.follow(automaton.unfinished)
        spent_s = 2 * _IDLE_S - self.budget.left_s
        attempt.replayed_s += max(spent_s, _IDLE_S)  # also where it saves up for its last piece
        return spent_s
