"""The n-gram index against a search of everything, and its bounds."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.core.speculation import ngram
from scheduler_service.core.speculation.drafters import NgramDrafter, ngram_populations
from scheduler_service.core.speculation.ngram import MIN_MATCH, NgramIndex

# Short texts over few tokens: neither limit of a search is reached by them.
few = st.lists(st.integers(0, 3), max_size=30)
steps = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), max_size=12)


def longest_match(tokens: list[int]) -> tuple[int, int]:
    """Length and end of the longest, most recent earlier occurrence of a suffix; (0, 0): too short."""
    known = len(tokens)
    best = (0, 0)
    for end in range(1, known):
        length = 0
        while length < end and tokens[end - 1 - length] == tokens[known - 1 - length]:
            length += 1
        best = max(best, (length, end))
    return best if best[0] >= MIN_MATCH else (0, 0)


@settings(max_examples=60)
@given(prompt=few, outputs=steps)
def test_the_longest_and_then_most_recent_match_is_found(prompt: list[int], outputs: list[list[int]]) -> None:
    tokens = list(prompt)
    index = NgramIndex(tokens)
    index.update()
    for output in [[], *outputs]:
        tokens += output
        index.update()
        length, end = longest_match(tokens)
        if length < ngram.SEARCH_MATCH and _occurrences(tokens) <= ngram.SEARCH_CANDIDATES:
            assert (index.match_length, index.match_end) == (length, end)
        assert _is_match(tokens, index)


def _occurrences(tokens: list[int]) -> int:
    """Of the last pair, at most so many at any time."""
    pairs = list(itertools.pairwise(tokens))
    return max((pairs.count(pair) for pair in pairs), default=0)


def _is_match(tokens: list[int], index: NgramIndex) -> bool:
    length, end = index.match_length, index.match_end
    return not length or (length <= end < len(tokens) and tokens[end - length : end] == tokens[-length:])


@settings(max_examples=60)
@given(prompt=few, outputs=steps, budget=st.integers(1, 5))
def test_an_index_that_is_behind_proposes_only_true_matches_and_ends_up_the_same(
    prompt: list[int], outputs: list[list[int]], budget: int
) -> None:
    tokens = list(prompt)
    index = NgramIndex(tokens)
    for output in outputs:
        tokens += output
        lag = index.lag
        indexed = index.update(budget)
        assert indexed == min(budget, lag) or (index.followed and index.lag <= ngram.LAZY)
        assert _is_match(tokens, index)
    while lag := index.lag:
        assert index.update(budget) == min(budget, lag)
    tokens += [7, 8, 9]  # whatever it followed meanwhile is over
    index.update()
    tokens += prompt[:4]
    index.update()
    at_once = NgramIndex(tokens)
    at_once.update()
    assert (index.match_length, index.match_end) == (at_once.match_length, at_once.match_end)


@settings(max_examples=60)
@given(prompt=few, outputs=steps)
def test_it_is_told_how_the_prediction_did(prompt: list[int], outputs: list[list[int]]) -> None:
    tokens = list(prompt)
    index = NgramIndex(tokens)
    index.update()
    for output in outputs:
        predicted = index.propose(len(output))
        length = index.match_length
        tokens += output
        index.update()
        right = 0
        while predicted and right < len(output) and predicted[right] == output[right]:
            right += 1
        assert index.scored_from == length
        assert index.followed == right
        assert index.broke == (bool(predicted) and right < len(output))


def test_a_repetition_goes_on_periodically() -> None:
    tokens = [1, 2, 3, 1, 2, 3, 1, 2]
    index = NgramIndex(tokens)
    index.update()
    assert index.propose(8) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert index.propose(0) == []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 20))
def test_drafts_are_what_follows_and_then_the_repetition(tokens: list[int], count: int) -> None:
    index = NgramIndex(tokens)
    index.update()
    drafts = index.propose(count)
    if not index.match_length:
        assert drafts == []
        return
    grown = list(tokens)
    for i in range(count):
        grown.append(grown[index.match_end + i])
    assert drafts == grown[len(tokens) :]


def test_a_search_looks_at_a_bounded_number_of_candidates() -> None:
    tokens: list[int] = []
    for i in range(1000):
        tokens += [1, 2, 1000 + i]
    best = [9, 8, 7, 1, 2]
    index = NgramIndex(best + tokens + best)
    while index.lag:
        index.update()
    assert index.match_length == 2  # the better match lies further back than it looks


def test_a_long_prompt_is_indexed_in_slices() -> None:
    index = NgramIndex(list(range(10_000)))
    assert [index.update(4096) for _ in range(4)] == [4096, 4096, 1808, 0]


def test_plain_steps_teach_what_drafts_would_have_done() -> None:
    line = list(range(100, 140))
    copying, chatting = list(line), list(line)
    good, bad = NgramDrafter(copying, ngram_populations()), NgramDrafter(chatting, ngram_populations())
    good.update()
    bad.update()
    before: list[float] = []
    for token in line:
        copying.append(token)
        good.update()
        if (candidate := good.candidate(4)) is not None:
            before.append(candidate.first)
    for i in range(20):  # a known pair, and then something else each time
        chatting += [100 + i, 101 + i]
        bad.update()
        chatting.append(200 + i)
        bad.update()
    chatting += [110, 111]
    bad.update()
    after = bad.candidate(4)
    assert after is not None
    assert before[-1] > 0.85
    assert after.first < 0.15
