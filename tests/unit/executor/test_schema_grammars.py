"""JSON schemas allow what they say, in the one way of writing it that is fixed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_service.grammar.source import GrammarInvalid
from tests.unit.executor.grammar_readings import (
    OBJECT,
    matches,
    of,
    schema,
)


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
