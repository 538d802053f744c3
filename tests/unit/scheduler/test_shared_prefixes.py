"""Which inputs of a call wait for which other one."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.core.evaluation import Evaluation, EvaluationInput, HiddenPooling
from scheduler_service.core.shared_prefixes import MIN_SHARED_TOKENS

QUERY = tuple(range(100, 160))


def waits(*prompts: Sequence[int], pooling: HiddenPooling | None = HiddenPooling.LAST) -> list[int | None]:
    return leaders(Evaluation(tuple(EvaluationInput(tuple(p)) for p in prompts), pooling))


def scored(*prompts: tuple[Sequence[int], int]) -> list[int | None]:
    return leaders(Evaluation(tuple(EvaluationInput(tuple(p), position) for p, position in prompts)))


def leaders(evaluation: Evaluation) -> list[int | None]:
    return [None if shared is None else shared.leader for shared in evaluation.leaders()]


def test_documents_behind_one_query_wait_for_the_shortest_of_them() -> None:
    assert waits((*QUERY, 1, 1, 1), (*QUERY, 2), (*QUERY, 1, 1)) == [1, None, 1]


def test_inputs_with_little_in_common_wait_for_none() -> None:
    assert waits((*QUERY[:31], 1), (*QUERY[:31], 2)) == [None, None]
    assert waits((1, *QUERY), (2, *QUERY)) == [None, None]


def test_nobody_waits_for_an_input_that_is_mostly_its_own() -> None:
    own = tuple(range(1000, 1100))
    assert waits((*QUERY, *own), (*QUERY, *own[::-1])) == [None, None]


def test_documents_that_begin_alike_still_wait_for_the_first_alone() -> None:
    """Else each would wait for the one before it, and all of them would be computed one after the other."""
    documents = [(*QUERY, 7, 7, number) for number in range(5)]
    assert waits((*QUERY, 1), *documents) == [None, 0, 0, 0, 0, 0]


def test_both_answers_to_a_long_document_wait_for_one_another_too() -> None:
    long, other = (*QUERY, *range(40)), (*QUERY, *range(50, 90))
    assert scored(((*other, 1), 100), ((*long, 1), 100), ((*long, 2), 100)) == [None, 0, 1]


def test_what_must_be_computed_is_not_waited_for() -> None:
    assert waits((*QUERY, 1), (*QUERY, 2), pooling=HiddenPooling.MEAN) == [None, None]
    assert scored(((*QUERY, 1), 60), ((*QUERY, 2), 1)) == [None, None]
    assert scored(((*QUERY, 1), 1), ((*QUERY, 2), 60)) == [None, 0]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_waiting_has_no_circles_and_pays(data: st.DataObject) -> None:
    stems = [tuple(range(n)) for n in (0, 33, 40, 70, 120)]
    tails = st.lists(st.integers(0, 2), min_size=1, max_size=40).map(tuple)
    prompts = data.draw(
        st.lists(st.tuples(st.sampled_from(stems), tails).map(lambda p: p[0] + p[1]), min_size=1, max_size=12)
    )
    found = waits(*prompts)
    for index, leader in enumerate(found):
        if leader is None:
            continue
        mine, its = prompts[index], prompts[leader]
        common = next((n for n, (a, b) in enumerate(zip(mine, its, strict=False)) if a != b), len(its))
        assert (len(its), leader) < (len(mine), index)
        assert common >= MIN_SHARED_TOKENS
        assert 2 * common >= len(its)
