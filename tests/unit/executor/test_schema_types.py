"""Types of pydantic and OpenAPI: their schemas compile, and what is allowed is a value of the type."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pydantic
import pytest
from paceline.schemas import json_schema
from tokenizers import Tokenizer

from executor_service.backends.byte_tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer
from executor_service.grammar.source import GrammarInvalid, GrammarSource
from tests.grammars.judges import complaint
from tests.grammars.types import PYTHON, type_schemas
from tests.grammars.walks import Walker
from tests.unit.executor.grammar_readings import matches, of, schema

WALKER = Walker(Tokenizer.from_str(byte_tokenizer().tokenizer_json.decode()), VOCAB_SIZE, (EOS_ID,))
WALKS = 5
SCHEMAS = type_schemas()
WIDER = {"Json", "dict with int keys", "datetime", "time", "timedelta", "Decimal", "Url"}
"""Types that refuse some values of their schemas: texts that are no JSON, seconds of 60, huge exponents."""
REFUSED = {"set", "frozenset"}
"""Their items can't be listed; the Python SDK leaves `uniqueItems` out, as sets take repeated items."""


def test_the_types_are_all_there() -> None:
    assert len(SCHEMAS) == 43


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_walks_end_in_values_of_the_type(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(GrammarInvalid, match="uniqueItems"):
            schema(SCHEMAS[name])
        source = GrammarSource("json_schema", json_schema(pydantic.TypeAdapter(PYTHON[name])))
    else:
        source = GrammarSource("json_schema", json.dumps(SCHEMAS[name]))
    grammar, ended, seed = of("json_schema", source.text), 0, 0
    while ended < WALKS:
        rng = random.Random(f"{name} {seed}")
        seed += 1
        output, whole = WALKER.walk(grammar, rng, [], closing_after=rng.randint(1, 40), max_tokens=300)
        if whole:
            text = bytes(token for token in output if token != EOS_ID).decode()
            assert not complaint(source, text), text
            if name in PYTHON and name not in WIDER:
                pydantic.TypeAdapter(PYTHON[name]).validate_json(text)
            ended += 1
        assert seed < 10 * WALKS


GOOD: dict[str, list[str]] = {
    "uuid1": ["c232ab00-9414-11ec-b3c8-9f6bdeced846"],
    "uuid4": ["01234567-89ab-4cde-8f01-23456789abcd", "01234567-89AB-4CDE-bF01-23456789ABCD"],
    "byte": ["", "QUI=", "QQ==", "QUJD", "+/+/"],
    "base64url": ["-_-_", "QQ=="],
    "password": ["", "x y"],
    "binary": ["\x00é"],
    "path": ["/a b/c", ""],
    "regex": ["", "^a+$", r"(?:[a-z]|\d{2,})*?x|y", "((a|b)c)?", r"[^0-9\w]\."],
    "json-pointer": ["", "/a/b~0~1", "/é//", "/"],
    "relative-json-pointer": ["0", "12#", "1/a"],
    "uri-reference": [
        "",
        "http://a.b/c?d#e",
        "../x",
        "?q",
        "#f",
        "/",
        "/a//b",
        "//host:80/p",
        "a/b:c",
        "mailto:x@y",
    ],
    "ipvanyaddress": ["127.0.0.1", "::1"],
}
BAD: dict[str, list[str]] = {
    "uuid1": ["01234567-89ab-4cde-8f01-23456789abcd", "c232ab00-9414-11ec-73c8-9f6bdeced846"],
    "uuid4": ["c232ab00-9414-11ec-b3c8-9f6bdeced846", "01234567-89ab-4cde-8f01-23456789abc", "x"],
    "byte": ["Q", "QQ", "QQ=", "QQ==QQ==", "-_-_", "QUI= "],
    "base64url": ["+/+/", "Q"],
    "regex": ["(", "a)", "[", "*", "a**", "a{3,2}", "\\", "[z-a]", "(?<x"],
    "json-pointer": ["a", "/~2", "/a~"],
    "relative-json-pointer": ["", "01", "a", "-1"],
    "uri-reference": [" ", "a b", "//[", "1:2", "%zz", "\\", "a#b#c", "http://a b"],
    "ipvanyaddress": ["1.2.3", "256.0.0.1", "x"],
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("rest", [{"type": "string"}, {}, {"pattern": "[^q]?", "maxLength": 60}])
def test_formats_demand_what_they_name(name: str, rest: dict[str, Any]) -> None:
    grammar = schema({"format": name, **rest})
    for text in GOOD[name]:
        assert matches(grammar, json.dumps(text, ensure_ascii=False)), text
    for text in BAD.get(name, []):
        assert not matches(grammar, json.dumps(text)), text
    assert matches(grammar, "17") == ("type" not in rest)


@pytest.mark.parametrize("name", ["decimal", "uri-template", "unknown", "x" * 1000])
def test_formats_that_are_not_known_demand_nothing_and_a_warning_says_so(name: str) -> None:
    value = {"type": "array", "items": [{"type": "string", "format": name}] * 2 + [{"format": name}]}
    part = {"structures": [{"begin": "<f>", "schema": value, "end": "</f>"}], "triggers": ["<f"]}
    kinds: list[tuple[str, str, str]] = [
        ("json_schema", json.dumps(value), "{}"),
        ("lark", f"start: %json {json.dumps(value)}", "{}"),
        ("structural_tag", json.dumps(part), "<f>{}</f>"),
    ]
    for kind, text, around in kinds:
        grammar = of(kind, text)
        assert grammar.warnings == (f'format "{name[:40]}" is not known here: it demands nothing',)
        assert matches(grammar, around.format('["anything", ""]'))
    assert schema({"type": "string", "format": "uuid4"}).warnings == ()


def test_contents_of_texts_are_annotations_except_base64() -> None:
    grammar = schema({"type": "string", "contentEncoding": "base64"})
    assert not grammar.warnings
    assert matches(grammar, '"QQ=="')
    assert not matches(grammar, '"Q"')
    for value in ({"contentEncoding": "quoted-printable"}, {"contentMediaType": "image/png"}):
        grammar = schema({"type": "string", **value})
        assert len(grammar.warnings) == 1
        assert matches(grammar, '"Q"')


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        ({}, ["9223372036854774784", "-9223372036854774784", "0"], ["9" * 19, "1" * 20, "-" + "1" * 20]),
        ({"minimum": 5}, ["9223372036854774784"], ["1" * 20, "4"]),
        ({"exclusiveMaximum": 5}, ["-9223372036854774784", "4"], ["-" + "1" * 20, "5"]),
        ({"multipleOf": 7}, ["7" * 18], ["7" * 20]),
        ({"format": "int32"}, ["2147483647", "-2147483648"], ["2147483648", "-2147483649"]),
        ({"format": "int32", "minimum": 0, "maximum": 2**40}, ["2147483647"], ["2147483648", "-1"]),
        ({"format": "uint8"}, ["0", "255"], ["256", "-1"]),
        ({"format": "int64"}, ["9223372036854774784"], ["1" * 20]),
        ({"enum": [2**60, 1], "format": "int32"}, [str(2**60), "1"], ["2"]),
    ],
)
@pytest.mark.parametrize("types", ["integer", ["integer", "null"]])
@pytest.mark.parametrize("place", ["alone", "in many places", "with an address"])
def test_integers_have_at_most_19_digits(
    value: dict[str, Any], good: list[str], bad: list[str], types: object, place: str
) -> None:
    one = {"type": types, "title": "t", **value}
    if place == "in many places":
        grammar = schema({"type": "array", "items": {"anyOf": [one, {"type": "array", "items": one}]}})
        texts: tuple[str, ...] = "[{}]", "[1, [{0}, {0}]]" if "minimum" not in value else "[[{0}, {0}]]"
    else:
        address = {"$id": "http://a/b"} if place == "with an address" else {}
        grammar, texts = schema({"allOf": [{**one, **address}]}), ("{}", "{}")
    if "maximum" in str(value) or "multiple" in str(value) or "enum" in str(value):
        texts = texts[:1]
    for text in texts:
        assert all(matches(grammar, text.format(number)) for number in good)
        assert not any(matches(grammar, text.format(number)) for number in bad)
    assert types == "integer" or "many" in place or matches(grammar, "null") or "enum" in value


def test_a_thousand_integers_fit_into_the_limits() -> None:
    names = [f"p{number}" for number in range(1000)]
    properties = {name: {"type": "integer", "description": name} for name in names}
    grammar = schema({"type": "object", "properties": properties, "required": names})
    text = json.dumps(dict.fromkeys(names, 17))
    assert matches(grammar, text)
    jsonschema.validate(json.loads(text), {"properties": properties})
