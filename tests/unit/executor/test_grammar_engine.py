"""The grammar engine against plain readings of its grammars, and its matchers against fresh replays."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_service.backends.byte_tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer
from executor_service.contract.grammar import Grammar, GrammarStuck
from executor_service.contract.masks import allowed_tokens, mask_bytes
from executor_service.grammar.automaton import Automaton
from executor_service.grammar.engine import GrammarEngine
from executor_service.grammar.source import GrammarInvalid, GrammarSource
from executor_service.grammar.tokenizer import TokenizerUnsupported
from tests.unit.executor.grammar_readings import (
    COMPILE_FUEL,
    ENGINE,
    OBJECT,
    STEP_FUEL,
    allows,
    ids,
    matches,
    of,
    schema,
)

TAG = {
    "structures": [
        {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<g>", "lark": "start: /[xy]+/", "end": "</g>"},
    ],
    "triggers": ["<f", "<g"],
}
GRAMMARS = {
    "schema": ("json_schema", json.dumps(OBJECT)),
    "any json": ("json_schema", "{}"),
    "regex": ("regex", r"(ab|a*c)[0-9]{2,4}(x|yy)?"),
    "free text": ("regex", r"(.|\n)*end"),
    "lark": ("lark", 'start: pair ("," pair)*\npair: /[a-z]+/ "=" NUMBER | "(" start ")"\nNUMBER: /[0-9]+/'),
    "tag": ("structural_tag", json.dumps(TAG)),
}


@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 256), max_size=8)), max_size=6))
def test_whatever_way_an_automaton_came_it_allows_what_a_fresh_one_does(
    name: str, turns: list[tuple[int, list[int]]]
) -> None:
    """Append, cut back to anywhere, past the end too; masks, forced tokens and refusals are equal."""
    grammar = of(*GRAMMARS[name])
    automaton, output = Automaton(grammar), ids("")
    for keep, choices in turns:
        output = output[:keep]
        automaton.follow(output)
        for choice in choices:
            following = sorted(allows(automaton.mask()))
            automaton.forced()
            output = np.append(output, np.int32(following[choice % len(following)]))
            assert automaton.follow(output) == len(output)
        fresh = Automaton(grammar)
        assert fresh.follow(output) == len(output)
        assert automaton.mask().tobytes() == fresh.mask().tobytes()
        assert automaton.forced() == fresh.forced()
        for token in (10, 65, 34, 125, EOS_ID):
            longer = np.append(output, np.int32(token))
            assert automaton.follow(longer) == fresh.follow(longer)
        automaton.follow(output)


@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=25, deadline=None)
@given(choices=st.lists(st.integers(0, 256), max_size=40))
def test_a_mask_allows_exactly_what_may_be_consumed(name: str, choices: list[int]) -> None:
    """For a vocabulary of bytes, in which nothing has two tokenizations."""
    matcher = of(*GRAMMARS[name]).matcher()
    for choice in choices:
        allowed = allows(matcher.mask())
        for token in (9, 34, 44, 48, 97, 120, 123, 125, EOS_ID):
            taken = matcher.consume(np.array([token], np.int32))
            assert bool(taken) == (token in allowed)
            if taken:
                matcher.rollback(1)
        following = sorted(allowed)
        matcher.consume(np.array([following[choice % len(following)]], np.int32))


@pytest.mark.parametrize("vocabulary", [257, 287, 288, 289, 320])
def test_every_mask_has_a_bit_for_each_token_and_no_word_more(vocabulary: int) -> None:
    """Before the end, where a special token is spelled, and behind the end: they are stacked and joined."""
    engine = GrammarEngine(byte_tokenizer().tokenizer_json, vocabulary, (EOS_ID,), COMPILE_FUEL, STEP_FUEL)
    matcher = engine.compile(GrammarSource("lark", 'start: "a<|eos" "|>"')).matcher()
    masks = [matcher.mask()]
    for token in (*ids("a<|eos|>").tolist(), EOS_ID):
        assert matcher.consume(np.array([token], np.int32)) == 1
        masks.append(matcher.mask())
    assert {mask.nbytes for mask in masks} == {mask_bytes(vocabulary)}


def test_the_end_is_allowed_where_the_text_is_one_of_the_grammar_and_nothing_behind_it() -> None:
    matcher = of("regex", "ab?").matcher()
    for text, allowed in (("a", {ord("b"), EOS_ID}), ("b", {EOS_ID})):
        assert matcher.consume(ids(text)) == 1
        assert allows(matcher.mask()) == allowed
    end = np.array([EOS_ID], np.int32)
    for _ in range(3):
        assert matcher.consume(end) == 1
        assert allows(matcher.mask()) == {EOS_ID}
        assert matcher.consume(ids("b")) == 0
    matcher.rollback(4)
    assert allows(matcher.mask()) == {ord("b"), EOS_ID}


def test_every_token_that_ends_a_sequence_is_allowed_at_the_end() -> None:
    both = GrammarEngine(
        byte_tokenizer().tokenizer_json, VOCAB_SIZE + 40, (EOS_ID, 0), COMPILE_FUEL, STEP_FUEL
    )
    matcher = both.compile(GrammarSource("regex", "ab?")).matcher()
    matcher.consume(ids("a"))
    assert set(np.flatnonzero(allowed_tokens(matcher.mask(), VOCAB_SIZE + 40)).tolist()) == {98, 0, EOS_ID}
    matcher.consume(np.array([0], np.int32))
    assert matcher.consume(np.array([EOS_ID, 0], np.int32)) == 2


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=6), st.text(max_size=12))
def test_choices_are_texts_and_no_patterns(choices: list[str], other: str) -> None:
    try:
        grammar = ENGINE.compile(GrammarSource("choices", choices=tuple(choices)))
    except GrammarInvalid:
        assert not any(choices)  # nothing but the empty text
        return
    assert all(matches(grammar, choice) for choice in choices)
    assert matches(grammar, other) == (other in choices)


@pytest.mark.parametrize(
    "pattern", [r"[a-c]{2,3}", r"(a|bc)*d?", r"\d{3}-\d{2}", r"a.c", "(?i)abc", "^abc$", "ü+"]
)
def test_a_regex_is_for_all_of_the_text(pattern: str) -> None:
    grammar = of("regex", pattern)
    for text in ("ab", "abc", "abcd", "bcbc", "d", "", "123-45", "a\nc", "axc", "ABC", "üü", "^abc$", "aab"):
        if text or not re.fullmatch(pattern, ""):
            assert matches(grammar, text) == bool(re.fullmatch(pattern, text)), text


def test_a_structural_tag_binds_what_follows_a_trigger() -> None:
    grammar = of(*GRAMMARS["tag"])
    for text in ("", "no tag", "a <f>12</f> b <g>xyx</g>", "<f>1</f><f>2</f>", "5 < 6"):
        assert matches(grammar, text), text
    for text in ("<f>x</f>", "<f>1", "<g>z</g>", "<foo"):
        assert not matches(grammar, text), text


def test_what_is_forced_is_told_up_to_the_next_choice() -> None:
    matcher = schema(OBJECT).matcher()
    assert bytes(matcher.forced()) == b'{"name": "'
    matcher.consume(ids('{"name": "Ann"'))
    assert bytes(matcher.forced()) == b', "age": '


@pytest.mark.parametrize(
    "source",
    [
        GrammarSource("choices", choices=("a<|eos|>b",)),
        GrammarSource("regex", r"a<\|eos\|>b"),
        GrammarSource("lark", 'start: "a<|eos" "|>b"'),
    ],
)
def test_text_that_spells_a_special_token_is_text(source: GrammarSource) -> None:
    grammar = ENGINE.compile(source)
    assert matches(grammar, "a<|eos|>b")
    automaton, output = Automaton(grammar), ids("")
    while EOS_ID not in output:
        following = sorted(allows(automaton.mask()))
        assert EOS_ID not in automaton.forced()
        output = np.append(output, np.int32(following[0]))
        assert automaton.follow(output) == len(output)
    assert bytes(output[:-1].tolist()) == b"a<|eos|>b"


@pytest.mark.parametrize(
    "text",
    ["x((a{100}){100}){100}", "x(.*a.{300}){5}|x(.*b.{299}){5}", "x" + "(a?){500}" * 9 + "a{500}"],
)
def test_work_is_bounded_behind_the_first_token_too(text: str) -> None:
    """Fuel ends such a matcher; it does not come back, and a new one ends at the same place."""
    ends = []
    for _ in range(2):
        output = ids("x")
        try:
            automaton = Automaton(of("regex", text))
            automaton.follow(output)
            for _ in range(40):
                following = sorted(allows(automaton.mask()))
                output = np.append(output, np.int32(following[0]))
                automaton.follow(output)
            ends.append((len(output), ""))
        except (GrammarInvalid, GrammarStuck) as error:
            ends.append((len(output), str(error)))
    assert ends[0] == ends[1]


def test_a_tokenizer_that_cannot_be_used_is_told() -> None:
    for tokenizer, ends in ((b"{}", (1,)), (byte_tokenizer().tokenizer_json, ()), (b"\xff", (1,))):
        with pytest.raises(TokenizerUnsupported):
            GrammarEngine(tokenizer, VOCAB_SIZE, ends, COMPILE_FUEL, STEP_FUEL)


EXPLODES = r"(?i)ümlaut|\p{Greek}" + "+}" * 40


def exhaust(grammar: Grammar) -> None:
    """Walk a matcher until it is stuck, which must not take long."""
    matcher = grammar.matcher()
    matcher.consume(ids(b"\xe1\xb5\x9d"))
    with pytest.raises(GrammarStuck):  # noqa: PT012
        for _ in range(40):
            matcher.mask()
            matcher.forced()
            matcher.consume(ids("}"))


def test_a_matcher_that_is_stuck_takes_nothing_from_those_beside_it() -> None:
    """They share a lexer: one that is exhausted calls tokens illegal that are not."""
    grammar = of("regex", EXPLODES)
    text = ids("ümlau")
    beside = Automaton(grammar)
    beside.follow(text)
    exhaust(grammar)
    later = Automaton(grammar)
    for automaton in (beside, later):
        assert automaton.follow(text) == len(text)
        assert allows(automaton.mask()) == {ord("t"), ord("T")}
    assert beside.follow(np.append(text, ids("t"))) == len(text) + 1


def test_a_replay_is_refused_no_token_because_others_have_exhausted_the_lexer() -> None:
    """The lexer of this grammar is exhausted behind each mask."""
    shared = of("json_schema", '{"type": "string", "pattern": "^(a|b|ab)*c(a?){500}(a){500}$"}')
    masks, output = set(), ids('"caaa')
    for _ in range(4):
        replaying = Automaton(shared)
        assert replaying.follow(output) == len(output)
        masks.add(replaying.mask().tobytes())
    assert len(masks) == 1
