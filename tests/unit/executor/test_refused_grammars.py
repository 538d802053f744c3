"""Grammars that can't be compiled are refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from executor_service.contract.grammar import GrammarStuck
from executor_service.grammar.ambiguity import count_rules
from executor_service.grammar.automaton import Automaton
from executor_service.grammar.engine import SharedLexer, TokenMatcher
from executor_service.grammar.source import GrammarInvalid
from tests.unit.executor.grammar_readings import (
    ENGINE,
    ids,
    matches,
    of,
)

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
    "not": ("json_schema", '{"not": {"const": "a"}}', 'Unimplemented keys: ["not"]'),
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
    "no json, in lark": ("lark", 'start: %json "x', "%json: no JSON after it"),
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
    "values of values": (
        "json_schema",
        json.dumps(
            {
                "items": {"$ref": "#/$defs/0"},
                "uniqueItems": True,
                "$defs": {
                    str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 20} if n < 6 else {"const": 1}
                    for n in range(7)
                },
            }
        ),
        "too many arrays to list",
    ),
    "many lists of arrays": (
        "json_schema",
        json.dumps(
            {
                "properties": {
                    f"p{n}": {"items": {"$ref": "#/$defs/x"}, "uniqueItems": True} for n in range(900)
                },
                "$defs": {"x": {"enum": list(range(5))}},
            }
        ),
        "too many arrays to list",
    ),
    "many places": (
        "json_schema",
        json.dumps({"properties": {f"p{n}": {"contains": {}, "maxItems": 16} for n in range(900)}}),
        "too many arrays to list",
    ),
    "without end": (
        "json_schema",
        '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}},'
        ' "required": ["x"], "additionalProperties": false}}}',
        "",
    ),
    "open group": ("regex", "(a|", "invalid regex: unclosed group"),
    "open group of a rule": ("lark", "start: x\nx: /(a/", "line 2, column 4: invalid regex: unclosed group"),
    "open group of a property": (
        "json_schema",
        '{"type": "object", "patternProperties": {"(": {}}}',
        "invalid regex: unclosed group",
    ),
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
    "tag with a second body of another type": (
        "structural_tag",
        '{"structures": [{"begin": "<", "schema": {}, "lark": 5}], "triggers": ["<"]}',
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


def test_rules_that_make_rows_of_items_explode_are_refused() -> None:
    many = " | ".join(["e e"] * 100)
    with pytest.raises(GrammarInvalid, match="at most 2000 in all, has 20502"):
        of("lark", f'start: /[a-d]/ /[a-d]/ e\ne: {many} | "=" |')


def test_an_ambiguous_output_is_refused_once_its_rows_have_grown() -> None:
    matcher = of("lark", 'start: e\ne: e e e | e e | "a" |').matcher()
    with pytest.raises(GrammarStuck, match="items; max is 260"):
        matcher.consume(ids("a" * 60))


def test_alternatives_of_a_rule_have_room_in_a_row() -> None:
    words = " | ".join(f'"w{number:03}"' for number in range(400))
    grammar = of("lark", f'start: word (" " word)*\nword: {words}')
    assert matches(grammar, "w001 w399 w200")


def test_what_exceeds_the_limits_behind_the_first_token_is_refused_when_it_is_compiled() -> None:
    with pytest.raises(GrammarInvalid, match="too many expressions"):
        of("regex", "a*" * 3000)


def test_a_long_token_of_a_grammar_of_rules_is_consumed_only_after_its_mask() -> None:
    asked: list[str] = []

    class Recorder(TokenMatcher):
        def _ask(self, method: Callable[..., Any], *args: object, **kwargs: object) -> Any:
            asked.append(method.__name__)
            return super()._ask(method, *args, **kwargs)

    lexer = SharedLexer(ENGINE.start('start: "a" "b" "a" "a"', None))
    matcher = Recorder(ENGINE, lexer, None, masked_first=frozenset(ids("a").tolist()))
    assert matcher.consume(ids("abaa")) == 4
    assert asked == ["compute_bitmask", "try_consume_tokens"] * 3


@pytest.mark.parametrize(
    ("lark", "alternatives", "row_work"),
    [
        ('start: e\ne: e e | X\nX: /a|b/ | "|"', 3, 6 + 0),
        ('?start: e // e: e | e\ne[max_tokens=3, capture="x]:"]: ( "a" | e )', 3, 4),
        ('start: %json {"start": true} e\ne.2 : "e: e"', 2, 1),
        ("_a: _a _a", 1, 2),
    ],
)
def test_alternatives_and_places_are_counted_where_lark_has_them(
    lark: str, alternatives: int, row_work: int
) -> None:
    assert count_rules(lark) == (alternatives, row_work)


def test_a_schema_whose_references_lead_to_too_many_alternatives_is_refused() -> None:
    def arrays(count: int) -> str:
        members = [{"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": i % 7} for i in range(count)]
        return json.dumps({"$defs": {"x": {"anyOf": members}}, "$ref": "#/$defs/x"})

    with pytest.raises(GrammarInvalid, match="at most 60000 in all, has 90601"):
        of("json_schema", arrays(300))
    of("json_schema", arrays(30))
