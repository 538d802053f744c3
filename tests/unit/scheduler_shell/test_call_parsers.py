"""Calls in a completion's text: found as they were written, however it came, and nothing else is lost."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.chat.events import Arguments, CallBegins, CallParser, Event
from scheduler_service.chat.hermes import BEGIN, END, HermesParser
from scheduler_service.chat.json_scanner import JsonScanner
from scheduler_service.chat.llama_json import TAG, LlamaJsonParser
from scheduler_service.chat.python_literal import MAX_PARTS, literal_as_json
from scheduler_service.chat.pythonic import PythonicParser

NAMES = frozenset({"f", "get_weather", "a-b"})
PARSERS: dict[str, Callable[[], CallParser]] = {
    "hermes, tokens": lambda: HermesParser(NAMES, by_id=True),
    "hermes, text": lambda: HermesParser(NAMES, by_id=False),
    "llama json, token": lambda: LlamaJsonParser(NAMES, by_id=True),
    "llama json, text": lambda: LlamaJsonParser(NAMES, by_id=False),
    "pythonic": lambda: PythonicParser(NAMES),
}
formats = pytest.mark.parametrize("name", PARSERS)
_MARKER = re.compile("|".join(map(re.escape, (BEGIN, END, TAG))))


def joined(events: Iterable[Event]) -> list[Event]:
    """Neighbouring pieces of text and of arguments as one."""
    whole: list[Event] = []
    for event in events:
        last = whole[-1] if whole else None
        if isinstance(event, str) and isinstance(last, str):
            whole[-1] = last + event
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            whole[-1] = Arguments(last.text + event.text)
        else:
            whole.append(event)
    return whole


def parse(name: str, text: str, cuts: Iterable[int] = ()) -> list[Event]:
    """The events of a text, cut into pieces; of a parser by tokens, each marker in it is one."""
    parser, by_id = PARSERS[name](), name.endswith(("tokens", "token"))
    events: list[Event] = []
    borders = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    markers = {found.start(): found.end() for found in _MARKER.finditer(text)} if by_id else {}
    inside = {at for start, end in markers.items() for at in range(start + 1, end)}
    borders = sorted((set(borders) | set(markers) | set(markers.values())) - inside)
    for start, end in itertools.pairwise(borders):
        piece = text[start:end]
        events += parser.marker(piece) if start in markers else parser.push(piece)
    return joined([*events, *parser.flush()])


def calls_of(events: list[Event]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for event in events:
        if isinstance(event, CallBegins):
            found.append((event.name, ""))
        elif isinstance(event, Arguments):
            found[-1] = (found[-1][0], found[-1][1] + event.text)
    return [(name, json.loads(arguments)) for name, arguments in found]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
calls = st.lists(
    st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.sampled_from("abcé"), values, max_size=3)),
    min_size=1,
    max_size=3,
)
dumps = st.sampled_from(
    [
        lambda value: json.dumps(value),
        lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        lambda value: json.dumps(value, indent=1),
    ]
)


def written(name: str, given_: list[tuple[str, dict[str, Any]]], dump: Callable[[Any], str]) -> str:
    """Calls as a model of this format writes them."""
    if name.startswith("hermes"):
        objects = [dump({"name": tool, "arguments": arguments}) for tool, arguments in given_]
        return "\n".join(f"{BEGIN}\n{one}\n{END}" for one in objects)
    if name.startswith("llama"):
        return "; ".join(dump({"name": tool, "parameters": arguments}) for tool, arguments in given_)
    parts = [
        f"{tool}({', '.join(f'{key}={dump(value)}' for key, value in arguments.items())})"
        for tool, arguments in given_
    ]
    return f"[{', '.join(parts)}]"


@formats
@settings(max_examples=20)
@given(given_=calls, dump=dumps, cuts=st.sets(st.integers(0, 400), max_size=12))
def test_calls_are_read_as_they_were_written_however_the_text_came(
    name: str, given_: list[tuple[str, dict[str, Any]]], dump: Callable[[Any], str], cuts: set[int]
) -> None:
    text = written(name, given_, dump)
    events = parse(name, text, cuts)
    assert calls_of(events) == given_
    assert not any(isinstance(event, str) for event in events)


fragments = st.sampled_from(
    [
        *(
            BEGIN,
            END,
            TAG,
            "\n",
            " ",
            "; ",
            ";",
            '{"name": "f", "arguments": {"a": 1}}',
            '"',
            "\\",
            "}",
            "]",
            ",",
        ),
        *(
            '{"name": "f", "parameters": {',
            '{"arguments": {"x": [1, "<"]}, "name": "f"}',
            "text",
            "<tool",
            "é",
        ),
        *(
            '{"name": "none", "arguments": {}}',
            '"name": ',
            '"f"',
            "[f(a=1",
            "[f(",
            "f()",
            ")",
            "'",
            "a=[1,",
            "1e",
        ),
        *('"b": "</tool_call>"', "{", ":", "tru", "-", "\x01", '{"name": "f"}'),
    ]
)
FRAME = re.compile(r'name|arguments|parameters|type|tool_call|python_tag|[\s{}":,;<|>/\[\]()=f]')
garbage = st.lists(fragments, max_size=9).map("".join)


@formats
@settings(max_examples=20)
@given(text=garbage, cuts=st.sets(st.integers(0, 200), max_size=20))
def test_any_split_of_any_text_gives_the_same_events(name: str, text: str, cuts: set[int]) -> None:
    assert parse(name, text, cuts) == parse(name, text) == parse(name, text, range(len(text)))


@formats
@settings(max_examples=20)
@given(text=garbage)
def test_nothing_disappears_but_the_frames_of_calls(name: str, text: str) -> None:
    """Every character comes out, except white space and what frames of calls consist of."""
    events = parse(name, text)
    if not any(isinstance(event, CallBegins) for event in events):
        assert "".join(map(str, events)) == text
    told = "".join(event if isinstance(event, str) else event[0] for event in events)
    assert sorted(FRAME.sub("", told)) == sorted(FRAME.sub("", text))


HERMES_CASES: dict[str, tuple[str, list[Event]]] = {
    "text around": (
        f'Well.\n{BEGIN}{{"name": "f", "arguments": {{}}}}{END}\nSo.',
        ["Well.\n", CallBegins("f"), Arguments("{}"), "\nSo."],
    ),
    "arguments first": (
        f'{BEGIN}{{"arguments": {{"a": 1}}, "name": "f"}}{END}',
        [CallBegins("f"), Arguments('{"a": 1}')],
    ),
    "an unknown tool": (f'{BEGIN}{{"name": "g", "arguments": {{}}}}{END}', []),
    "no arguments": (f'{BEGIN}\n{{"name": "f"}}\n{END}', []),
    "arguments as a string": (f'{BEGIN}{{"name": "f", "arguments": "{{}}"}}{END}', []),
    "no object": (f"{BEGIN}[1]{END}", []),
    "markers alone": (f"{END}{BEGIN}{BEGIN} {END}", []),
    "cut in the head": (f'{BEGIN}\n{{"name": "f", "argu', []),
    "cut in the arguments": (
        f'{BEGIN}{{"name": "f", "arguments": {{"a": "x',
        [CallBegins("f"), Arguments('{"a": "x')],
    ),
    "no end marker": (
        f'{BEGIN}{{"name": "f", "arguments": {{}}}}\n{BEGIN}{{"name": "f", "arguments": {{}}}}',
        [CallBegins("f"), Arguments("{}"), CallBegins("f"), Arguments("{}")],
    ),
    "arguments that stop being JSON": (
        f'{BEGIN}{{"name": "f", "arguments": {{"a": tru!}}}}{END}',
        [CallBegins("f"), Arguments('{"a": tru'), f"!}}}}{END}"],
    ),
    "a marker in a string": (
        f'{BEGIN}{{"name": "f", "arguments": {{"a": "{END}{BEGIN}"}}}}{END}',
        [CallBegins("f"), Arguments(f'{{"a": "{END}{BEGIN}"}}')],
    ),
    "begun anew": (
        f'{BEGIN}{{"name": {BEGIN}{{"name": "f", "arguments": {{}}}}{END}',
        [f'{BEGIN}{{"name": ', CallBegins("f"), Arguments("{}")],
    ),
}


@pytest.mark.parametrize("case", HERMES_CASES)
@pytest.mark.parametrize("name", ["hermes, tokens", "hermes, text"])
def test_what_hermes_models_write(name: str, case: str) -> None:
    text, expected = HERMES_CASES[case]
    assert parse(name, text) == (expected or [text])


def test_text_that_spells_a_marker_is_text_where_markers_are_tokens() -> None:
    text = f'{BEGIN}{{"name": "f", "arguments": {{}}}}{END}'
    parser = HermesParser(NAMES, by_id=True)
    assert joined([*parser.push(text), *parser.flush()]) == [text]


LLAMA_CASES: dict[str, tuple[str, list[Event]]] = {
    "a type": (
        '{"type": "function", "name": "f", "parameters": {"a": 1}}',
        [CallBegins("f"), Arguments('{"a": 1}')],
    ),
    "behind a tag": (f'{TAG}{{"name": "f", "parameters": {{}}}}', [CallBegins("f"), Arguments("{}")]),
    "behind text and a tag": (
        f'So: {TAG}{{"name": "f", "parameters": {{}}}}',
        ["So: ", CallBegins("f"), Arguments("{}")],
    ),
    "code behind a tag": (f"{TAG}print(1)", []),
    "an answer that is JSON": ('{"a": 1}', []),
    "behind text": ('I call {"name": "f", "parameters": {}}', []),
    "text behind it": (
        '{"name": "f", "parameters": {}} is it',
        [CallBegins("f"), Arguments("{}"), " is it"],
    ),
    "nothing behind a semicolon": (
        '{"name": "f", "parameters": {}}; ',
        [CallBegins("f"), Arguments("{}"), "; "],
    ),
    "white space": (" \n", []),
}


@pytest.mark.parametrize("case", LLAMA_CASES)
@pytest.mark.parametrize("name", ["llama json, token", "llama json, text"])
def test_what_llama_models_write(name: str, case: str) -> None:
    text, expected = LLAMA_CASES[case]
    assert parse(name, text) == (expected or [text])


PYTHONIC_CASES: dict[str, tuple[str, list[Event]]] = {
    "a call": (
        "[f(a=1, b='x', c=[True, None])]",
        [CallBegins("f"), Arguments('{"a": 1, "b": "x", "c": [true, null]}')],
    ),
    "none": ("[]", []),
    "a list": ("[1, 2]", []),
    "an unknown tool": ("[g(a=1)]", []),
    "a positional argument": ("[f(1)]", []),
    "the same argument twice": ("[f(a=1, a=2)]", [CallBegins("f"), Arguments('{"a": 1'), ", a=2)]"]),
    "an expression": ("[f(a=1 + 1)]", []),
    "text behind it": ("[f()] so", [CallBegins("f"), Arguments("{}"), " so"]),
    "cut": ('[f(a=1, b="x', [CallBegins("f"), Arguments('{"a": 1'), ', b="x']),
    "brackets in strings": (
        '[f(a=\')]\', b="\\")")]',
        [CallBegins("f"), Arguments('{"a": ")]", "b": "\\")"}')],
    ),
}


@pytest.mark.parametrize("case", PYTHONIC_CASES)
def test_what_models_write_in_pythons_syntax(case: str) -> None:
    text, expected = PYTHONIC_CASES[case]
    assert parse("pythonic", text) == (expected or [text])


@settings(max_examples=40)
@given(values, st.sampled_from([repr, json.dumps]))
def test_a_literal_of_python_or_of_json_is_read(value: Any, write: Callable[[Any], str]) -> None:
    assert json.loads(literal_as_json(write(value))) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "f(1)",
        "nan",
        "Infinity",
        "-.5e999",
        "{1: 2}",
        "[1 2]",
        "'a",
        "b'x'",
        "1 +",
        "[" * 200 + "''" + "]" * 200,
    ],
)
def test_anything_else_is_no_literal(text: str) -> None:
    with pytest.raises(ValueError, match=r"no |behind|must be|not JSON"):
        literal_as_json(text)


@pytest.mark.parametrize("part", ["True,", "1.5,", "[],", "'\\\\',", "('a'),"])
def test_a_literal_has_a_bounded_number_of_parts_unless_it_is_json(part: str) -> None:
    """Or the end of one value of a megabyte would hold up everybody's streams for seconds."""
    short, long = (f"[{(MAX_PARTS // size) * part}]" for size in (8, 2))
    assert calls_of(parse("pythonic", f"[f(a={short})]")) == [
        ("f", {"a": json.loads(literal_as_json(short))})
    ]
    with pytest.raises(ValueError, match=f"more than {MAX_PARTS} parts"):
        literal_as_json(long)
    assert parse("pythonic", f"[f(a={long})]") == [f"[f(a={long})]"]
    as_json = json.dumps(["a\\"] * MAX_PARTS)
    assert literal_as_json(as_json) == as_json
    text = "'" + "x" * (1 << 20) + "'"
    assert literal_as_json(text) == f'"{text[1:-1]}"'


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    assert literal_as_json(r"'\ud800'") == r'"\ud800"'
    assert json.loads(literal_as_json(r"'\ud83d\ude00\x41\n\q'")) == "\N{GRINNING FACE}A\n\\q"


@settings(max_examples=30)
@given(values.filter(lambda value: isinstance(value, str | list | dict)), dumps, st.text(max_size=3))
def test_the_scanner_finds_the_end_of_a_value(value: Any, dump: Callable[[Any], str], behind: str) -> None:
    text = dump(value)
    scanner = JsonScanner()
    assert scanner.push(text + behind) == len(text)
    assert scanner.done
    assert not scanner.failed


@given(
    st.text(alphabet='{}[]":,\\ 01.eE+-trufalsn\n\x01é', min_size=1, max_size=14).map(lambda text: "[" + text)
)
def test_the_scanner_stops_where_no_json_can_follow(text: str) -> None:
    """Whatever it has taken is JSON or the beginning of some: `json` can make the same of it."""
    scanner = JsonScanner()
    taken = text[: scanner.push(text)]
    if scanner.done:
        json.loads(taken)
    else:
        assert scanner.failed == (len(taken) < len(text))
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)
