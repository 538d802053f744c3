"""What an automaton allows is what a replay of the output does, however it got there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_service.contract.grammar import GrammarStuck, ReplayUnfinished
from executor_service.contract.masks import allowed_tokens
from executor_service.grammar.automaton import Automaton
from executor_service.grammar.replay_budget import ReplayBudget
from tests.unit.executor.fakes import ids
from tests.unit.executor.table_grammar import END, VOCABULARY, TableGrammar, loops


def allows(automaton: Automaton) -> set[int]:
    return set(np.flatnonzero(allowed_tokens(automaton.mask(), VOCABULARY)).tolist())


@st.composite
def walks(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """Where to go on from (a length of the output then), and by which choices."""
    return draw(st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(0, 5), max_size=6)), max_size=8))


def outputs(grammar: TableGrammar, turns: list[tuple[int, list[int]]]) -> Iterator[list[int]]:
    """The output after each turn of a walk."""
    output: list[int] = []
    for keep, choices in turns:
        output = output[:keep]
        for choice in choices:
            following = sorted(grammar.allowed(output))
            output.append(following[choice % len(following)])
        yield output


@given(walks(), st.integers(0, 40))
def test_the_state_is_that_of_a_replay(turns: list[tuple[int, list[int]]], stuck_after: int) -> None:
    """Append, cut, go another way, verify and take back; a matcher that gets stuck on the way is replaced."""
    grammar, plain = loops(), loops()
    grammar.stuck_after = 30 + stuck_after
    automaton = Automaton(grammar)
    for output in outputs(plain, turns):
        assert automaton.follow(ids(*output)) == len(output)
        assert allows(automaton) == plain.allowed(output)
        fresh = Automaton(plain)
        fresh.follow(ids(*output))
        assert automaton.forced() == fresh.forced()


@given(walks(), st.integers(0, 40), st.integers(1, 9))
def test_the_state_is_that_of_a_replay_however_often_it_ran_out_of_time(
    turns: list[tuple[int, list[int]]], stuck_after: int, tokens: int
) -> None:
    grammar, plain = loops(), loops()
    grammar.stuck_after = 30 + stuck_after
    budget = ReplayBudget(lambda: float(grammar.consumed))
    automaton = Automaton(grammar, budget)

    def state(output: list[int]) -> tuple[int, set[int], list[int]]:
        for _ in range(1000):
            budget.renew(2 * tokens)
            try:
                return automaton.follow(ids(*output)), allows(automaton), automaton.forced()
            except ReplayUnfinished:
                assert automaton.unfinished is not None
        raise AssertionError("no end")

    for output in outputs(plain, turns):
        fresh = Automaton(plain)
        fresh.follow(ids(*output))
        assert state(output) == (len(output), plain.allowed(output), fresh.forced())


@given(walks(), st.integers(0, 256))
def test_it_stops_before_the_first_token_that_is_not_allowed(
    turns: list[tuple[int, list[int]]], wrong: int
) -> None:
    grammar = loops()
    automaton = Automaton(grammar)
    for _, choices in turns:
        output: list[int] = []
        for choice in choices:
            following = sorted(grammar.allowed(output))
            output.append(following[choice % len(following)])
        if wrong in grammar.allowed(output):
            continue
        assert automaton.follow(ids(*output, wrong, 10)) == len(output)
        assert automaton.why_not(ids(*output, wrong)) == (
            f"the grammar does not allow token {wrong} as number {len(output) + 1} of the output"
        )
        assert allows(automaton) == grammar.allowed(output)
        assert not automaton.push(wrong)
        assert allows(automaton) == grammar.allowed(output)


def test_nothing_but_what_ends_follows_the_end() -> None:
    automaton = Automaton(loops())
    assert automaton.follow(ids(END, END)) == 2
    assert allows(automaton) == {END}
    assert automaton.follow(ids(END, 10)) == 1


def test_following_one_more_token_costs_one_token() -> None:
    grammar = loops()
    automaton = Automaton(grammar)
    output = ids(*[11, 10, 10, 11] * 50)
    for length in range(len(output)):
        automaton.follow(output[: length + 1])
        automaton.mask()
    assert grammar.matchers == 1


def test_what_is_stuck_after_a_replay_too_is_told_and_the_next_try_begins_anew() -> None:
    grammar = TableGrammar({0: {10: 1}}, ends=set())
    automaton = Automaton(grammar)
    automaton.follow(ids(10))
    for _ in range(2):
        with pytest.raises(GrammarStuck, match="allows no token"):
            automaton.mask()
        with pytest.raises(GrammarStuck):
            automaton.mask()
    assert automaton.follow(ids()) == 0
    assert allows(automaton) == {10}


def test_a_replay_that_nobody_else_has_disturbed_is_not_repeated() -> None:
    """It may be long, and the device waits for it."""
    grammar = loops()
    grammar.stuck_after = 10
    with pytest.raises(GrammarStuck):
        Automaton(grammar).follow(ids(*[11] * 40))
    assert grammar.matchers == 1
