"""A grammar that begins behind a token: before it anything but the end, behind it what the grammar allows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_service.contract.masks import allowed_tokens
from executor_service.grammar.automaton import Automaton
from executor_service.grammar.late import LateGrammar
from tests.unit.executor.fakes import ids
from tests.unit.executor.table_grammar import END, VOCABULARY, TableGrammar, loops

BEGIN = 12
"""It is a token of the grammar too: only the first one begins it."""
FREE = set(range(VOCABULARY)) - {END}


def late(grammar: TableGrammar) -> LateGrammar:
    return LateGrammar(grammar, BEGIN, VOCABULARY, {END})


def allows(automaton: Automaton) -> set[int]:
    return set(np.flatnonzero(allowed_tokens(automaton.mask(), VOCABULARY)).tolist())


def expected(output: list[int]) -> set[int]:
    """The definition."""
    return loops().allowed(output[output.index(BEGIN) + 1 :]) if BEGIN in output else FREE


turns = st.lists(
    st.tuples(st.integers(0, 20), st.lists(st.integers(0, 256) | st.just(BEGIN), max_size=6)), max_size=8
)


@settings(max_examples=40)
@given(turns, st.integers(0, 40))
def test_the_state_is_a_function_of_the_output_however_it_was_reached(
    walk: list[tuple[int, list[int]]], stuck_after: int
) -> None:
    """Append, cut before and behind the beginning, go on otherwise; with a matcher that gets stuck, too."""
    grammar = loops()
    grammar.stuck_after = 30 + stuck_after
    automaton = Automaton(late(grammar))
    output: list[int] = []
    for keep, choices in walk:
        output = output[:keep]
        for choice in choices:
            following = sorted(expected(output))
            output.append(choice if choice in following else following[choice % len(following)])
        assert automaton.follow(ids(*output)) == len(output)
        assert allows(automaton) == expected(output)
        fresh = Automaton(late(loops()))
        fresh.follow(ids(*output))
        assert automaton.forced() == fresh.forced()
        assert BEGIN in output or not automaton.forced()


@settings(max_examples=20)
@given(st.lists(st.integers(0, 255), max_size=6), st.integers(0, 256))
def test_it_stops_before_an_end_that_comes_too_early_and_before_what_the_grammar_does_not_allow(
    output: list[int], wrong: int
) -> None:
    free = [token for token in output if token != BEGIN]
    automaton = Automaton(late(loops()))
    assert automaton.follow(ids(*free, END, BEGIN)) == len(free)
    if wrong not in loops().allowed([]):
        assert automaton.follow(ids(*free, BEGIN, wrong, 10)) == len(free) + 1


def test_only_the_model_may_choose_before_it() -> None:
    """Masks are there from the first position on: without one, the end would be allowed."""
    automaton = Automaton(late(loops()))
    assert allows(automaton) == FREE
    automaton.follow(ids(END - 1, BEGIN))
    assert allows(automaton) == loops().allowed([])
