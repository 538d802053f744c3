"""The grammar engine against plain readings of its grammars, and its matchers against fresh replays."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_service.backends.byte_tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer
from executor_service.contract.grammar import Grammar, GrammarStuck
from executor_service.contract.masks import allowed_tokens, mask_bytes
from executor_service.grammar.automaton import Automaton
from executor_service.grammar.engine import GrammarEngine, TokenizerUnsupported
from executor_service.grammar.source import GrammarInvalid, GrammarSource

COMPILE_FUEL, STEP_FUEL = 1_000_000, 50_000
ENGINE = GrammarEngine(byte_tokenizer().tokenizer_json, VOCAB_SIZE, (EOS_ID,), COMPILE_FUEL, STEP_FUEL)


def ids(text: str | bytes) -> np.ndarray:
    return np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8).astype(np.int32)


def matches(grammar: Grammar, text: str) -> bool:
    """Whether a text is one of the grammar: it may be written, and end there."""
    matcher = grammar.matcher()
    return matcher.consume(ids(text)) == len(ids(text)) and EOS_ID in allows(matcher.mask())


def allows(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(allowed_tokens(mask, VOCAB_SIZE)).tolist())


def of(kind: str, text: str) -> Grammar:
    return ENGINE.compile(GrammarSource(kind, text))  # type: ignore[arg-type]


def schema(value: object) -> Grammar:
    return of("json_schema", json.dumps(value))


OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 40},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
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


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        (
            OBJECT,
            ['{"name": "Ann", "age": 33}', '{"name": "", "age": 0, "tags": ["a", null]}'],
            ['{"name": "Ann"}'],
        ),
        (
            {"type": "array", "items": {"type": "boolean"}},
            ["[]", "[true, false]"],
            ["[true,false]", "[ ]", "true"],
        ),
        ({"type": "string", "pattern": "^[0-9]{3}$"}, ['"123"'], ['"1234"', "123"]),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"enum": [1, "a"]}}}, ["1", '"a"'], ["2"]),
        (
            {"type": "array", "items": {"type": "integer"}, "x-guidance": {"item_separator": ","}},
            ["[1,2]"],
            ["[1, 2]"],
        ),
    ],
)
def test_json_schemas_with_fixed_separators(value: object, good: list[str], bad: list[str]) -> None:
    grammar = schema(value)
    assert [matches(grammar, text) for text in good] == [True] * len(good)
    assert [matches(grammar, text) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    ("name", "spelled", "others"),
    [
        ("a", "a", [r"\u0061"]),
        ("é", "é", [r"\u00e9", r"\u00E9"]),
        ("a/b", "a/b", [r"a\/b", r"a\u002fb"]),
        ('"', r"\"", [r"\u0022"]),
        ("\\", r"\\", [r"\u005c", r"\u005C"]),
        ("\b", r"\b", [r"\u0008"]),
        ("\n", r"\n", [r"\u000a", r"\u000A"]),
        ("\x1f", r"\u001f", [r"\u001F"]),
        ("😀", "😀", [r"\ud83d\ude00"]),
    ],
)
def test_a_key_has_one_spelling_and_so_one_schema(name: str, spelled: str, others: list[str]) -> None:
    """A key in other letters would be one that the schema does not name, and could be anything."""
    grammar = schema(
        {
            "type": "object",
            "properties": {name: {"type": "integer"}},
            "additionalProperties": {"type": "string"},
        }
    )
    assert matches(grammar, f'{{"{spelled}": 1}}')
    assert matches(grammar, '{"other": "x"}')
    for key in (spelled, *others):
        assert json.loads(f'"{key}"') == name
        assert not matches(grammar, f'{{"{key}": "x"}}'), key


def test_control_characters_can_be_written_and_backslashes_are_no_escapes_of_what_follows() -> None:
    grammar = schema({"type": "string"})
    every = "".join(map(chr, range(0x20))) + '\x7f"\\u0061'
    assert matches(grammar, json.dumps(every, ensure_ascii=False).replace("\x7f", r"\u007f"))
    assert matches(schema({"const": every}), json.dumps(every, ensure_ascii=False).replace("\x7f", r"\u007f"))
    assert not matches(grammar, r'"\u0061"')


@pytest.mark.parametrize(
    "rest", [{}, {"pattern": "^[12]"}, {"pattern": "^[12]", "allOf": [{"minLength": 1}]}]
)
@pytest.mark.parametrize(
    "place", [lambda s: s, lambda s: {"$ref": "#/$defs/default", "$defs": {"default": s}}]
)
def test_dates_are_those_of_the_calendar(rest: dict[str, object], place: Callable[[object], object]) -> None:
    for form, time in (("date", ""), ("date-time", "T00:00:00Z")):
        grammar = schema(place({"type": "string", "format": form, **rest}))
        for day in ("2024-02-29", "2000-02-29", "2023-02-28", "1999-12-31", "2023-03-29"):
            assert matches(grammar, f'"{day}{time}"'), day
        for day in ("2023-02-29", "1900-02-29", "2024-02-30", "2023-04-31", "2023-13-01", "2023-00-10"):
            assert not matches(grammar, f'"{day}{time}"'), day


BIG = (
    st.integers(2**53 - 3, 2**53 + 9) | st.integers(2**60, 2**60 + 999) | st.integers(2**63 - 2999, 2**63 - 1)
)
BIG |= BIG.map(lambda number: -number) | st.integers(-9, 9)


@settings(max_examples=200, deadline=None)
@given(lower=BIG, span=st.integers(0, 4000) | st.none(), off=st.integers(-3, 3), exclusive=st.booleans())
def test_integers_are_within_bounds_that_doubles_would_round(
    lower: int, span: int | None, off: int, exclusive: bool
) -> None:
    value: dict[str, object] = {"type": "integer", "exclusiveMinimum" if exclusive else "minimum": lower}
    if span is not None:
        value["maximum"] = lower + span
    try:
        grammar = schema(value)
    except GrammarInvalid:
        return
    for number in (lower + off, lower + (span or 0) + off, lower + (span or 0) + 1000 * off):
        within = lower + exclusive <= number <= (lower + span if span is not None else number)
        assert within or not matches(grammar, str(number)), number


@pytest.mark.parametrize("number", [2**53, -(2**53), 2**53 + 2, 2**60, 10**18, -(10**18)])
def test_large_integers_that_are_doubles_can_be_demanded(number: int) -> None:
    for value in ({"const": number}, {"enum": ["a", [number]]}):
        grammar = schema(value)
        assert matches(grammar, json.dumps([number] if "enum" in value else number))
        assert not matches(grammar, json.dumps([number + 1] if "enum" in value else number + 1))


def test_schemas_inside_of_lark_grammars_are_checked_as_others_are() -> None:
    grammar = of("lark", 'start: "<" %json {"type": "string", "format": "date"} ">"')
    assert matches(grammar, '<"2024-02-29">')
    assert not matches(grammar, '<"2023-02-29">')


@pytest.mark.parametrize("ways", [{}, {"x-guidance": {"item_separator": ","}}])
def test_json_has_fixed_separators_wherever_its_schema_stands(ways: dict[str, object]) -> None:
    value = {"type": "array", "items": {"const": 1}, **ways}
    tag = {"structures": [{"begin": "<f>", "schema": value, "end": "</f>"}], "triggers": ["<f"]}
    good, bad = ("[1,1]", "[1, 1]") if ways else ("[1, 1]", "[1,1]")
    for grammar, around in (
        (schema(value), "{}"),
        (of("lark", f"start: %json {json.dumps(value)}"), "{}"),
        (of("structural_tag", json.dumps(tag)), "<f>{}</f>"),
    ):
        assert matches(grammar, around.format(good))
        for text in (bad, "[ 1]", "[1 ]", "[\n1]"):
            assert not matches(grammar, around.format(text))


def test_what_is_no_schema_is_no_date() -> None:
    value = {"format": "date", "x": 1}
    assert matches(schema({"const": value}), json.dumps(value))
    assert matches(schema({"enum": [1, value]}), json.dumps(value))


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


BAD = {
    "no json": ("json_schema", "{", "no JSON schema"),
    "no schema": ("json_schema", "3", ""),
    "deep": ("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000, "no JSON schema: recursion limit"),
    "contradiction": (
        "json_schema",
        '{"type": "integer", "minimum": 5, "maximum": 1}',
        "Unsatisfiable schema",
    ),
    "network": ("json_schema", '{"$ref": "https://example.com/x.json"}', "https://example.com/x.json"),
    "file": ("json_schema", '{"$ref": "file:///etc/passwd"}', "file:///etc/passwd"),
    "unique": (
        "json_schema",
        '{"type": "array", "uniqueItems": true}',
        'Unimplemented keys: ["uniqueItems"]',
    ),
    "not": ("json_schema", '{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
    "two keys that may be one": (
        "json_schema",
        '{"properties": {"x": {"type": "object", "minProperties": 2}}}',
        "minProperties: 2: at most one more than the required ones",
    ),
    "no double": (
        "json_schema",
        '{"enum": [1, {"x": 9007199254740993}]}',
        "enum: 9007199254740993: this integer",
    ),
    "the least integer": ("json_schema", '{"const": -9223372036854775808}', "beyond 64 bits"),
    "rounded to it": ("json_schema", '{"items": {"const": -9223372036854775807}}', "beyond 64 bits"),
    "at most the least integer": (
        "json_schema",
        '{"type": "integer", "minimum": -9223372036854775808, "maximum": -9223372036854775808}',
        "maximum: -9223372036854775808: beyond 64 bits",
    ),
    "at least beyond": (
        "json_schema",
        '{"type": "integer", "minimum": 1e300, "maximum": 2e300}',
        "beyond 64 bits",
    ),
    "the least integer, in lark": ("lark", 'start: %json\n{"const": -9223372036854775808}', "beyond 64 bits"),
    "no json, in lark": ("lark", 'start: %json "x', "%json: no JSON behind it"),
    "the least integer, in a tag": (
        "structural_tag",
        '{"structures": [{"begin": "<", "schema": {"const": -9223372036854775808}}], "triggers": ["<"]}',
        "beyond 64 bits",
    ),
    "parameters without end": ("lark", 'start: a::0x0\na::_: "a" | a::incr(_) "b"', "rules with parameters"),
    "less than it says": (
        "json_schema",
        '{"uniqueItems": true, "x-guidance": {"lenient": true}}',
        "x-guidance",
    ),
    "no json in the end": ("json_schema", '{"x-guidance": {"item_separator": ";"}}', "x-guidance"),
    "itself": ("json_schema", '{"$ref": "#"}', ""),
    "without end": (
        "json_schema",
        '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}},'
        ' "required": ["x"], "additionalProperties": false}}}',
        "",
    ),
    "open group": ("regex", "(a|", "unclosed group"),
    "look-ahead": ("regex", "(?=a)b", "look-around"),
    "back-reference": ("regex", r"(a)\1", "backreferences"),
    "explosion": ("regex", "((a{100}){100}){100}", ""),
    "no lark": ("lark", "start: ]", ""),
    "no start": ("lark", 'begin: "a"', "start"),
    "unknown rule": ("lark", "start: x", "x"),
    "without end, lark": ("lark", 'start: "a" x\nx: "b" x', ""),
    "no lark, but what the library reads instead": (
        "lark",
        ' {"grammars": [{"json_schema": {"not": {}, "x-guidance": {"lenient": true}}}]}',
        "JSON, and no Lark",
    ),
    "more that may come next than is bearable": (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{number}": {} for number in range(300)}}),
        "max is 1000",
    ),
    "nothing but itself": ("json_schema", '{"$ref": "#"}', "allows no token"),
    "an end inside": ("lark", 'start: <|eos|> "a"', "allows no token"),
    "unknown special token": ("lark", "start: <|nope|>", "nope"),
    "tag without json": ("structural_tag", "x", "no JSON"),
    "tag without triggers": (
        "structural_tag",
        '{"structures": [{"begin": "<f>", "schema": {}}]}',
        "triggers",
    ),
    "tag with a stray begin": (
        "structural_tag",
        '{"structures": [{"begin": "f", "schema": {}}], "triggers": ["<"]}',
        "structures[0].begin: starts with none of the triggers",
    ),
    "tag with two bodies": (
        "structural_tag",
        '{"structures": [{"begin": "<", "schema": {}, "lark": ""}], "triggers": ["<"]}',
        "structures[0]: either schema",
    ),
    "tag with an unknown key": (
        "structural_tag",
        '{"structures": [{"begin": "<", "schema": {}, "x": 1}], "triggers": ["<"]}',
        "structures[0]: an object with",
    ),
}


def test_a_schema_in_a_grammar_may_say_what_means_something_in_lark() -> None:
    value = {"std::string %json {": "::1"}
    schema = {"description": "::", "enum": [value, "%json"]}
    parts = [{"begin": "<f>", "schema": schema, "end": "</f>"}]
    tag = json.dumps({"structures": parts, "triggers": ["<f>"]})
    text = json.dumps(value)
    for grammar, before in (
        (of("lark", f"start: %json {json.dumps(schema)}"), ""),
        (of("structural_tag", tag), "<f>"),
    ):
        automaton, output = Automaton(grammar), ids(before + text)
        assert automaton.follow(output) == len(output)
        assert automaton.follow(ids(before + '"%json"')) == len(before) + 7
        assert automaton.follow(ids(before + '":')) == len(before) + 1


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_compiled_is_told_why_in_a_line(name: str) -> None:
    kind, text, told = BAD[name]
    with pytest.raises(GrammarInvalid) as caught:
        of(kind, text)
    message = str(caught.value)
    assert told in message
    assert 0 < len(message) <= 400
    assert "\n" not in message


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
