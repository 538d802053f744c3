"""Sequences with a grammar, step by step over the oracle: what is sampled, refused and forced."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.backends.oracle_backend.oracle import OracleBackend
from executor_service.contract.plan import (
    Fork,
    Opening,
    OutputMode,
    Reason,
    Release,
    Row,
    Sampling,
    Truncate,
)
from tests.unit.executor.fakes import ids, limits
from tests.unit.executor.harness import Harness, row
from tests.unit.executor.table_grammar import END, VOCABULARY, TableGrammar, loops
from tests.unit.executor.test_masks import masks_of

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def h() -> Harness:
    return Harness(limits(vocab_size=VOCABULARY, max_drafts=3), OracleBackend())


def constrained(
    cache_id: int,
    tokens: list[int],
    grammar: TableGrammar,
    *,
    prompt_length: int = 5,
    seed: int = 0,
    limit: int = 0,
) -> Opening:
    sampling = Sampling(temperature=1.0, seed=seed, grammar=grammar)
    return Opening(cache_id, np.array(tokens, np.int32), prompt_length, limit, sampling)


def solo(tokens: list[int], seed: int, grammar: TableGrammar | None = None) -> int:
    """The token behind these, of an engine that has seen nothing else; five of them are the prompt."""
    h = Harness(limits(vocab_size=VOCABULARY), OracleBackend())
    (token,) = h.row(constrained(1, tokens, grammar or loops(), seed=seed)).tokens
    return token


def run(count: int, seed: int = 0, grammar: TableGrammar | None = None) -> list[int]:
    """The output of an undisturbed run."""
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(solo(tokens, seed, grammar))
    return tokens[5:]


def test_every_token_is_allowed_behind_those_before_it(h: Harness) -> None:
    grammar = loops()
    for seed in range(8):
        output = h.row(constrained(seed + 1, PROMPT, grammar, seed=seed)).tokens
        for length in range(5, 17):
            output += h.row(row(seed + 1, length)).tokens
        for length, token in enumerate(output):
            assert token in grammar.allowed(output[:length])
        assert output == run(13, seed)


def test_behind_the_end_only_the_end_comes(h: Harness) -> None:
    grammar = TableGrammar({0: {10: 1}}, ends={1})
    h.row(constrained(1, PROMPT, grammar))
    assert [h.row(row(1, length)).tokens for length in range(5, 9)] == [[END]] * 4


@pytest.mark.parametrize("right", range(4))
def test_verifying_drafts_gives_the_tokens_of_decoding(h: Harness, right: int) -> None:
    expected = run(8)
    h.row(constrained(1, PROMPT, loops()))
    drafts = expected[1:4]
    drafts[right:] = [99] * (3 - right)
    result = h.row(row(1, 5, drafts=drafts))
    assert result.tokens == expected[1 : 2 + right]
    assert result.kv_length == 6 + right
    length, output = result.kv_length, expected[: 2 + right]
    while len(output) < 8:
        output += h.row(row(1, length)).tokens
        length += 1
    assert output == expected


def test_what_follows_an_illegal_draft_is_not_computed(h: Harness) -> None:
    fed: list[int] = []
    forward = h.backend.forward

    def counting(rows: list[ForwardRow]) -> list[RowOutput]:
        fed.extend(len(each.tokens) for each in rows)
        outputs: list[RowOutput] = forward(rows)
        return outputs

    h.backend.forward = counting
    h.row(constrained(1, PROMPT, TableGrammar({0: {10: 0}}, ends=set())))
    assert h.row(row(1, 5, drafts=[10, 99, 10])).tokens == [10, 10]
    assert fed == [5, 2]


def test_a_draft_into_a_dead_end_is_not_accepted(h: Harness) -> None:
    """The row emits the token that leads there, as decoding does; the next one is refused."""
    grammar = TableGrammar({0: {10: 1}, 1: {11: 2}, 2: {12: 3}}, ends=set())
    h.row(constrained(1, PROMPT, grammar))
    result = h.row(row(1, 5, drafts=[11, 12]))
    assert (result.tokens, result.kv_length) == ([11, 12], 7)
    before = h.snapshot()
    refusal = h.row(row(1, 7)).refusal
    assert refusal is not None
    assert (refusal.reason, refusal.message) == (
        Reason.GRAMMAR,
        "rows.cache_ids[0]: the grammar allows no token here",
    )
    assert h.snapshot() == before


def test_several_steps_follow_the_grammar_and_end_before_a_dead_end(h: Harness) -> None:
    h.row(constrained(1, PROMPT, loops()))
    assert h.row(row(1, 5, steps=7)).tokens == run(8)[1:]
    dead = TableGrammar({0: {10: 1}, 1: {11: 2}, 2: {12: 3}}, ends=set())
    h.row(constrained(2, PROMPT, dead))
    result = h.row(row(2, 5, steps=6))
    assert (result.tokens, result.kv_length) == ([11, 12], 7)


def test_an_opening_with_output_goes_on_where_it_stands(h: Harness) -> None:
    expected = run(9)
    for length in range(9):
        opened = h.row(constrained(length + 1, PROMPT + expected[:length], loops()))
        assert opened.tokens == [expected[length]]


def test_chunks_and_pieces_do_not_matter() -> None:
    small = Harness(limits(vocab_size=VOCABULARY, max_piece_tokens=2), OracleBackend())
    expected = run(9)
    opened = small.row(constrained(1, PROMPT + expected[:4], loops(), limit=3))
    assert opened.tokens == []
    assert small.row(row(1, 3)).tokens == [expected[4]]
    assert small.row(row(1, 9, steps=4)).tokens == expected[5:]


def test_illegal_output_refuses_an_opening_before_it_takes_anything(h: Harness) -> None:
    before = h.snapshot()
    refusal = h.row(constrained(1, [*PROMPT, 10, 99], loops())).refusal
    assert refusal is not None
    assert refusal.reason is Reason.GRAMMAR
    assert refusal.message == (
        "openings[0].tokens: the grammar does not allow token 99 as number 2 of the output"
    )
    assert h.snapshot() == before
    assert h.row(constrained(1, [*PROMPT, 10, 12], loops())).refusal is None


def test_given_tokens_are_checked_and_only_those_behind_the_prompt(h: Harness) -> None:
    h.row(constrained(1, PROMPT, loops()))
    before = h.snapshot()
    bad = h.row(row(1, 5, tokens=[10, 12, 99])).refusal
    assert bad is not None
    assert (bad.reason, bad.message) == (
        Reason.GRAMMAR,
        "rows.tokens[0]: the grammar does not allow token 99 as number 3 of the output",
    )
    assert h.snapshot() == before
    assert h.row(row(1, 5, tokens=[11, 10])).tokens == [solo([*PROMPT, 11, 10], 0)]
    h.op(Truncate(1, 3))
    assert h.row(row(1, 3, tokens=[99, 98, 10])).tokens == [solo([*PROMPT[:3], 99, 98, 10], 0)]


def test_tokens_fed_without_sampling_are_checked_too(h: Harness) -> None:
    h.row(constrained(1, PROMPT, loops()))
    bad = h.row(row(1, 5, tokens=[10, 10], output=OutputMode.NONE)).refusal
    assert bad is not None
    assert bad.reason is Reason.GRAMMAR
    assert h.row(row(1, 5, tokens=[10, 12], output=OutputMode.NONE)).tokens == []
    assert h.row(row(1, 7, tokens=[14])).tokens == [solo([*PROMPT, 10, 12, 14], 0)]


def test_other_output_modes_are_not_masked(h: Harness) -> None:
    h.row(constrained(1, PROMPT, loops()))
    full = h.row(row(1, 5, drafts=[99, 98], output=OutputMode.FULL))
    assert full.refusal is None
    assert full.logits is not None
    assert np.isfinite(full.logits).all()
    stays = h.row(row(1, 8, tokens=[10])).refusal  # behind 99, which was kept
    assert stays is not None
    assert stays.reason is Reason.GRAMMAR
    h.op(Truncate(1, 5))
    assert h.row(row(1, 5, tokens=[10])).tokens == [12]


def test_after_a_truncation_the_state_is_that_of_what_is_left(h: Harness) -> None:
    expected = run(8)
    h.row(constrained(1, PROMPT, loops()))
    h.row(row(1, 5, steps=7))
    for length in (10, 7, 6, 5):
        h.op(Truncate(1, length))
        tail = expected[length - 6] if length > 5 else None
        if tail is None:
            assert h.row(row(1, 5, tokens=[expected[0]])).tokens == [expected[1]]
        else:
            h.op(Truncate(1, length - 1))
            assert h.row(row(1, length - 1, tokens=[tail])).tokens == [expected[length - 5]]


def test_a_fork_has_the_grammar_that_it_is_given_from_where_it_begins(h: Harness) -> None:
    expected = run(8)
    h.row(constrained(1, PROMPT, loops()))
    h.row(row(1, 5, steps=7))
    same = Sampling(temperature=1.0, grammar=loops())
    assert h.op(Fork(1, 2, 7, same)).refusal is None
    assert h.row(row(2, 7, tokens=[expected[2]])).tokens == [expected[3]]
    assert h.row(row(1, 12)).tokens == [solo(PROMPT + expected, 0)]
    other = TableGrammar({0: {200: 0}}, ends=set())
    refused = h.op(Fork(1, 3, 7, Sampling(grammar=other))).refusal
    assert refused is not None
    assert refused.reason is Reason.GRAMMAR
    assert refused.message.startswith("fork.sampling.grammar: the grammar does not allow token")
    assert h.op(Fork(1, 3, 5, Sampling(grammar=other))).refusal is None
    assert h.row(row(3, 5, tokens=[200])).tokens == [200]
    assert h.op(Fork(1, 4, 7, Sampling(seed=1, temperature=1.0))).refusal is None
    free = h.row(row(4, 7, tokens=[99])).tokens
    assert (
        free
        == h.row(Opening(5, ids(*PROMPT, *expected[:2], 99), 5, 0, Sampling(seed=1, temperature=1.0))).tokens
    )


def test_neighbours_are_sampled_as_without_it(h: Harness) -> None:
    free = Sampling(temperature=1.0, seed=3)
    h.step(constrained(1, PROMPT, loops()), Opening(2, ids(*PROMPT), 5, 0, free))
    both = h.step(row(1, 5), row(2, 5)).rows
    alone = Harness(limits(vocab_size=VOCABULARY), OracleBackend())
    alone.row(Opening(2, ids(*PROMPT), 5, 0, free))
    assert both[1].tokens == alone.row(row(2, 5)).tokens
    assert both[0].tokens == run(2)[1:]


def test_what_is_forced_is_told_behind_the_last_token(h: Harness) -> None:
    """And sent as drafts it is accepted; at most max_drafts of it."""
    grammar = TableGrammar({i: {100 + i: i + 1} for i in range(9)}, ends={9})
    first = h.row(constrained(1, PROMPT, grammar))
    assert (first.tokens, first.forced) == ([100], [101, 102, 103])
    second = h.row(row(1, 5, drafts=first.forced))
    assert (second.tokens, second.forced) == ([101, 102, 103, 104], [105, 106, 107])
    assert h.row(row(1, 9, steps=2)).forced == [107, 108, END]
    plain = h.row(Opening(2, ids(*PROMPT), 5, 0, Sampling()))
    assert plain.forced == []


def test_a_mask_and_a_grammar_must_both_allow_a_token(h: Harness) -> None:
    def masked(plain: Row, *allowed: set[int]) -> Row:
        return replace(plain, masks=masks_of(*allowed))

    grammar = TableGrammar({0: {10: 0, 11: 0, 12: 0}}, ends=set())
    h.row(constrained(1, PROMPT, grammar))
    assert h.row(masked(row(1, 5), {12, 99})).tokens == [12]
    assert h.row(masked(row(1, 6, drafts=[10, 11]), {10}, {11}, {12, 50})).tokens == [10, 11, 12]
    assert h.row(masked(row(1, 9, drafts=[10, 11]), {10}, {99}, {12})).tokens == [10]
    refusal = h.row(masked(row(1, 10), {99})).refusal
    assert refusal is not None
    assert (refusal.reason, refusal.message) == (
        Reason.GRAMMAR,
        "rows.masks[0]: it and the grammar have no token in common",
    )
    opening = replace(constrained(2, PROMPT, grammar), mask=masks_of({99}))
    refusal = h.row(opening).refusal
    assert refusal is not None
    assert refusal.message == "openings[0].mask: it and the grammar have no token in common"


def test_the_mask_of_stop_ids_gives_way_and_the_grammar_never(h: Harness) -> None:
    grammar = TableGrammar({0: {10: 1}, 1: {11: 2}}, ends={1, 2})
    sampling = Sampling(temperature=1.0, grammar=grammar, stop_token_ids=(END, 11), min_tokens=9)
    h.row(Opening(1, ids(*PROMPT), 5, 0, sampling))
    assert h.row(row(1, 5)).tokens[0] in (11, END)
    held = Sampling(temperature=1.0, grammar=grammar, stop_token_ids=(END,), min_tokens=9)
    h.row(Opening(2, ids(*PROMPT), 5, 0, held))
    assert h.row(row(2, 5)).tokens == [11]
    assert h.row(row(2, 6)).tokens == [END]


def prepare_masks(h: Harness) -> None:
    """As the device thread does while it waits."""
    while h.engine.pipeline.has_unprepared:
        h.engine.pipeline.prepare_next_mask()


def test_a_mask_that_was_computed_early_is_not_computed_for_its_row(h: Harness) -> None:
    grammar, pipeline = loops(), h.engine.pipeline
    h.step(*[constrained(i, PROMPT, grammar, seed=i) for i in (1, 2, 3)])
    assert pipeline.has_unprepared
    assert grammar.masks == 3
    for masks in (4, 5, 6, 6):
        pipeline.prepare_next_mask()
        assert grammar.masks == masks
    assert not pipeline.has_unprepared
    rows = h.step(*[row(i, 5) for i in (1, 2, 3)]).rows
    assert grammar.masks == 6
    assert [one.tokens for one in rows] == [run(2, i)[1:] for i in (1, 2, 3)]


def test_no_mask_is_computed_early_for_what_was_released_or_has_no_grammar(h: Harness) -> None:
    grammar = loops()
    h.step(constrained(1, PROMPT, grammar), constrained(2, PROMPT, grammar, seed=2))
    h.op(Release((1,)))
    prepare_masks(h)
    assert grammar.masks == 3
    h.row(Opening(3, ids(*PROMPT), 5, 0, Sampling()))
    assert not h.engine.pipeline.has_unprepared


def test_a_mask_that_was_computed_early_for_another_place_is_computed_again(h: Harness) -> None:
    expected = run(8)
    h.row(constrained(1, PROMPT, loops()))
    h.row(row(1, 5, steps=7))
    prepare_masks(h)
    h.op(Truncate(1, 8))
    assert h.row(row(1, 8, tokens=[expected[3]])).tokens == [expected[4]]
    prepare_masks(h)
    assert h.row(row(1, 9, drafts=expected[5:7])).tokens == expected[5:8]
    prepare_masks(h)
    assert h.op(Fork(1, 2, 7, Sampling(temperature=1.0, grammar=loops()))).refusal is None
    assert h.row(row(2, 7, tokens=[expected[2]])).tokens == [expected[3]]
    assert h.row(row(1, 12)).tokens == [solo(PROMPT + expected, 0)]


def test_a_grammar_without_a_word_refuses_its_opening(h: Harness) -> None:
    before = h.snapshot()
    refusal = h.row(constrained(1, PROMPT, TableGrammar({}, ends=set()))).refusal
    assert refusal is not None
    assert (refusal.reason, refusal.message) == (
        Reason.GRAMMAR,
        "openings[0].sampling.grammar: the grammar allows no token here",
    )
    assert h.snapshot() == before
