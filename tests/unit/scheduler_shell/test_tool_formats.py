"""The format of a model's calls: known by its template, and demanded by a grammar that the parser reads."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from executor_service.contract.masks import allowed_tokens
from executor_service.grammar.engine import GrammarEngine
from executor_service.grammar.source import GrammarInvalid, GrammarSource
from scheduler_service.chat.argument_texts import text_arguments
from scheduler_service.chat.call_grammar import ToolGrammarError
from scheduler_service.chat.events import Arguments, CallBegins, Event
from scheduler_service.chat.formats import FORMATS, MARKERS, ToolFormat, format_of, takes_tools
from scheduler_service.chat.tools import OfferedTool
from tests.unit.scheduler_shell.chat_styles import CHATML, STYLES, Style
from tests.unit.scheduler_shell.test_call_parsers import calls_of, joined
from tests.unit.scheduler_shell.tool_styles import HERMES, LLAMA, PYTHONIC, QWEN, TOOL_STYLES

EXPECTED = {
    "Qwen2.5": "hermes",
    "Qwen3": "hermes",
    "Hermes": "hermes",
    "markers as text": "hermes",
    "names in tokens": "hermes",
    "gpt-oss": "harmony",
    "Qwen3-Coder": "qwen3-coder",
    "Seed-OSS": "seed-oss",
    "GLM-4.5": "glm-4.5",
    "markers of GLM as text": "glm-4.5",
    "MiniMax-M2": "minimax-m2",
    "Granite 3": "granite",
    "Mistral": "mistral",
    "Ministral 3": "mistral",
    "Llama 3": "llama3-json",
    "Llama 3 pythonic": "llama3-pythonic",
}
TOOLS = (
    OfferedTool(
        "get_weather",
        "",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 5},
                "days": {"type": "integer", "minimum": 0, "maximum": 99},
                "where": {"$ref": "#/$defs/place"},
                "flag": {"type": "boolean"},
            },
            "required": ["days"],
            "additionalProperties": False,
            "$defs": {"place": {"enum": ["in", '::"%json:::', None, [1]]}},
        },
    ),
    OfferedTool("now", "", {"type": "object", "properties": {}, "additionalProperties": False}),
)


def added(style: Style) -> dict[str, int]:
    return style.encoder.added_tokens(MARKERS)


def format_named(style: Style, setting: str = "auto") -> ToolFormat:
    found = format_of(style.template, added(style), setting)
    assert found is not None
    return found


@pytest.mark.parametrize("name", TOOL_STYLES)
def test_a_template_tells_its_format(name: str) -> None:
    found = format_named(TOOL_STYLES[name])
    assert found.name == EXPECTED[name]
    assert set(found.markers.values()) <= set(MARKERS)
    assert ("as text" in name) <= (not found.markers)


@pytest.mark.parametrize("name", STYLES)
def test_a_template_that_ignores_tools_has_no_format_whatever_the_setting(name: str) -> None:
    for setting in ("auto", "none", *FORMATS):
        assert format_of(STYLES[name].template, added(STYLES[name]), setting) is None


def test_what_is_unknown_is_not_guessed_and_can_be_set() -> None:
    unknown = CHATML + "{% if tools %}{{ tools | tojson }}{% endif %}"
    qwen_coder = QWEN + "{{ '<function=' }}"
    for template in (unknown, qwen_coder):
        assert takes_tools(template)
        assert format_of(template, {}) is None
        found = format_of(template, {}, "llama3-json")
        assert found is not None
        assert found.name == "llama3-json"
    assert format_of(QWEN, {}, "none") is None
    assert not takes_tools(CHATML + "{{ 'these are tools: ' }}{# tools #} tools {{ message.content }}")
    assert all(map(takes_tools, (QWEN, LLAMA, HERMES, PYTHONIC)))


def test_braces_that_nothing_closes_are_read_once() -> None:
    template = "{{ messages }}{#" + 300_000 * "{{ " + "#}"  # hours, if each were followed to the end
    assert not takes_tools(template)
    assert takes_tools("{{ tools }}" + template)


def matches_its_schema(tool: str, arguments: dict[str, Any]) -> bool:
    """As TOOLS have them."""
    if tool == "now":
        return arguments == {}
    city, flag, days = arguments.get("city", ""), arguments.get("flag", True), arguments["days"]
    return (
        arguments.keys() <= {"city", "days", "where", "flag"}
        and (isinstance(city, str) and len(city) <= 5)
        and (isinstance(flag, bool) and isinstance(days, int) and 0 <= days <= 99)
        and arguments.get("where", "in") in ["in", '::"%json:::', None, [1]]
    )


def end_of(name: str) -> int:
    """The token that ends a turn."""
    tokenizer = TOOL_STYLES[name].tokenizer()
    ends = (
        "<|im_end|>",
        "<|eot_id|>",
        "<|return|>",
        "<seed:eos>",
        "<|endoftext|>",
        "[e~[",
        "<|end_of_text|>",
        "</s>",
    )
    found = map(tokenizer.token_to_id, ends)
    return next(id_ for id_ in found if id_ is not None)


@functools.cache
def engine(name: str) -> GrammarEngine:
    tokenizer = TOOL_STYLES[name].tokenizer()
    size = tokenizer.get_vocab_size()
    return GrammarEngine(tokenizer.to_str().encode(), size, (end_of(name),), 1_000_000, 50_000)


FORMS = [
    *("Qwen3", "Llama 3", "Llama 3 pythonic", "markers as text", "Qwen3-Coder", "Seed-OSS", "GLM-4.5"),
    *("markers of GLM as text", "MiniMax-M2", "Granite 3", "Mistral", "Ministral 3"),
]


def walk(name: str, grammar: str, seed: int) -> list[int]:
    """The ids of a random text of a grammar, without the end."""
    rng, size, end = random.Random(seed), TOOL_STYLES[name].tokenizer().get_vocab_size(), end_of(name)
    matcher, ids = engine(name).compile(GrammarSource("lark", grammar)).matcher(), list[int]()
    while True:
        allowed = np.flatnonzero(allowed_tokens(matcher.mask(), size)).tolist()
        if end in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return ids
        ids.append(rng.choice([token for token in allowed if token != end]))
        assert matcher.consume(np.array(ids[-1:], np.int32)) == 1


def parsed(name: str, style: ToolFormat, ids: list[int], tools: Iterable[OfferedTool]) -> list[Event]:
    """What the parser finds, for these tools."""
    tokenizer = TOOL_STYLES[name].tokenizer()
    parser = style.parser({tool.name: text_arguments(tool.parameters) for tool in tools})
    events: list[Event] = []
    run: list[int] = []
    for id_ in ids:
        if id_ in style.markers:
            events += [*parser.push(tokenizer.decode(run)), *parser.marker(style.markers[id_])]
            run = []
        else:
            run.append(id_)
    return joined([*events, *parser.push(tokenizer.decode(run)), *parser.flush()])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("single", [True, False])
def test_whatever_its_grammar_allows_is_calls_that_match_the_schemas(name: str, single: bool) -> None:
    style = format_named(TOOL_STYLES[name])
    grammar = style.grammar(TOOLS, int(single))
    several = 0
    for seed in range(6):
        events = parsed(name, style, walk(name, grammar, seed), TOOLS)
        assert {type(event) for event in events} <= {CallBegins, Arguments}
        found = calls_of(events)
        assert found
        assert not single or len(found) == 1
        several += len(found) > 1
        for tool, arguments in found:
            assert matches_its_schema(tool, arguments)
        texts = [event.text for event in events if isinstance(event, Arguments)]
        assert all(
            text == json.dumps(json.loads(text), ensure_ascii=False) for text in texts if "\\u" not in text
        )
    assert single or name == "Llama 3" or several


def test_remarks_of_a_schema_are_no_part_of_the_grammar_and_everything_else_is() -> None:
    properties = {
        "title": {"const": {"title": "kept"}, "description": "left out"},
        "description": {"enum": ["kept", {"description": "kept"}], "title": "left out"},
    }
    parameters = {
        "properties": properties,
        "anyOf": [{"$comment": "left out"}],
        "title": 1,
        "description": "left out",
    }
    grammar = format_named(TOOL_STYLES["Qwen3"]).grammar((OfferedTool("f", "", parameters),), 1)
    assert grammar.count("kept") == 3
    assert "left out" not in grammar
    assert grammar.count('"description"') == 2
    assert '"title":1' in grammar


def test_demanded_arguments_have_no_properties_that_the_schema_does_not_name_unless_it_says_so() -> None:
    inner = {"type": "object", "properties": {"additionalProperties": {}, "properties": {"properties": {}}}}
    cases: list[tuple[dict[str, Any], int]] = [
        ({"properties": {}}, 1),
        ({"properties": {"a": inner, "b": {"type": "array", "items": inner}}}, 5),
        ({"properties": {"a": inner}, "additionalProperties": True}, 2),
        ({"type": "object"}, 0),
        ({"properties": {"a": {}}, "required": ["b"]}, 0),
        ({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]}, 0),
    ]
    style = format_named(TOOL_STYLES["Qwen3"])
    for parameters, closed in cases:
        grammar = style.grammar((OfferedTool("f", "", parameters),), 1)
        assert grammar.count('"additionalProperties":false') == closed, parameters
        engine("Qwen3").compile(GrammarSource("lark", grammar))
    wrong = {"properties": {"a": {}}, "required": [["a"]]}
    grammar = style.grammar((OfferedTool("f", "", wrong),), 1)
    with pytest.raises(GrammarInvalid, match="Expected string for 'required' item"):
        engine("Qwen3").compile(GrammarSource("lark", grammar))


def test_what_keyword_arguments_can_not_promise_is_told() -> None:
    style = format_named(TOOL_STYLES["Llama 3 pythonic"])
    for parameters, problem in (
        ({"patternProperties": {}}, "'patternProperties' can't be demanded"),
        ({"properties": {"a-b": {}}}, "property 'a-b'"),
        ({"properties": {}, "required": ["x"]}, "'x' is required"),
        ({"properties": {"x": {}}, "required": [["x"]]}, r"\['x'\] is required"),
        ({"properties": []}, "must be an object"),
    ):
        with pytest.raises(ToolGrammarError, match=problem) as caught:
            style.grammar((TOOLS[1], OfferedTool("f", "", parameters)), 1)
        assert caught.value.index == 1
