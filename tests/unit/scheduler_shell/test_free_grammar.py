"""Answers in which text and calls may be: the calls are those that the request allows, the text is free."""

from __future__ import annotations

import json
import random
from itertools import chain
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from executor_service.contract.grammar import Matcher
from executor_service.contract.masks import allowed_tokens
from executor_service.grammar.engine import CompiledGrammar
from executor_service.grammar.source import GrammarSource
from scheduler_service.chat.formats import ToolFormat
from scheduler_service.chat.tools import CallRules, SentTool
from tests.unit.scheduler_shell.test_call_parsers import calls_of
from tests.unit.scheduler_shell.test_tool_formats import end_of, engine, format_named, parsed
from tests.unit.scheduler_shell.tool_styles import TOOL_STYLES

SCHEMA = {
    "type": "object",
    "properties": {"days": {"enum": [1, 2]}, "city": {"type": "string", "maxLength": 9}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOLS = (SentTool("get_weather", "", json.dumps(SCHEMA)), SentTool("now", "", ""), SentTool("other", "", ""))
NAMES = [tool.name for tool in TOOLS]
OFFERED = [tool.parsed() for tool in TOOLS]
STYLES = [
    ("Qwen3", "auto"),
    ("Hermes", "auto"),
    ("markers as text", "auto"),
    ("Llama 3", "auto"),
    ("markers as text", "llama3-json"),
]
"""A tokenizer's name, and the setting tool-format."""


def answer(name: str, style: ToolFormat, rules: CallRules) -> CompiledGrammar:
    """The grammar of text and calls."""
    assert style.answer is not None
    lark = style.answer([tool.parsed() for _index, tool in rules.bound(TOOLS)], rules.max_calls)
    return engine(name).compile(GrammarSource("lark", lark))


def ids_of(name: str, style: ToolFormat, *texts: str) -> list[int]:
    """Token ids of texts; one that is a marker of the format is its token."""
    tokenizer, ids = TOOL_STYLES[name].tokenizer(), {text: id_ for id_, text in style.markers.items()}
    # Cut into characters, a text that spells a marker does not become its token.
    encoded = (
        [ids[text]] if text in ids else chain.from_iterable(tokenizer.encode(one).ids for one in text)
        for text in texts
    )
    return list(chain.from_iterable(encoded))


def call(style: ToolFormat, tool: str, arguments: str) -> list[str]:
    """A call as the format writes it, in parts of which some are markers."""
    if style.name == "llama3-json":
        return [f'{{"name": "{tool}", "parameters": {arguments}}}']
    return ["<tool_call>", f'\n{{"name": "{tool}", "arguments": {arguments}}}\n', "</tool_call>"]


def temptations(style: ToolFormat) -> list[list[str]]:
    """What a model may want to write: text, calls of each kind, and parts of them."""
    key = "parameters" if style.name == "llama3-json" else "arguments"
    return [
        ["Well, it's 21 °C.\n"],
        ['{"answer": [1]}'],
        *(
            [text]
            for text in ("<", "<tool", "_call>", "<tool_call>", "</tool_call>", "<|python_tag|>", "; ", "\n")
        ),
        call(style, "get_weather", '{"days": 1}'),
        call(style, "get_weather", '{"days": 3, "city": "x"}'),
        call(style, "now", '{"free": {"as": "it likes"}}'),
        call(style, "other", "{}"),
        [f'{{"{key}": {{}}, "name": "other"}}'],
        [f'\n{{ "n\\u0061me": "other", "{key}": {{}}}}'],
        ['{"type": "function", '],
    ]


def finish(name: str, matcher: Matcher, rng: random.Random) -> list[int]:
    """Ids that lead to an end by short ways: brackets and quotation marks close what is open."""
    tokenizer, ids, end = TOOL_STYLES[name].tokenizer(), list[int](), end_of(name)
    closing = [tokenizer.token_to_id(text) for text in ("}", "]", '"', "</tool_call>")]
    while end not in (allowed := np.flatnonzero(allowed_tokens(matcher.mask(), tokenizer.get_vocab_size()))):
        chosen = next((id_ for id_ in closing if id_ is not None and id_ in allowed), None)
        ids.append(int(rng.choice(allowed)) if chosen is None else chosen)
        assert matcher.consume(np.array(ids[-1:], np.int32)) == 1
        assert len(ids) < 300
    return ids


def tempted(name: str, style: ToolFormat, matcher: Matcher, seed: int) -> list[int]:
    """The ids of an answer of a model that writes what it wants as far as the grammar lets it."""
    rng, ids = random.Random(seed), list[int]()
    for wanted in rng.choices(temptations(style), k=rng.randrange(1, 9)):
        wish = ids_of(name, style, *wanted)
        ids += wish[: matcher.consume(np.array(wish, np.int32))]
    return ids + finish(name, matcher, rng)


RULES = [
    CallRules((0, 1, 2), demanded=False, strict=frozenset({0})),
    CallRules((0, 1), demanded=False, strict=frozenset({0, 1})),
    CallRules((0, 1), demanded=False),
    CallRules((0, 1, 2), demanded=False, max_calls=1),
    CallRules((0,), demanded=False, max_calls=2, strict=frozenset({0})),
]


@pytest.mark.parametrize(("name", "setting"), STYLES)
@pytest.mark.parametrize("rules", RULES)
def test_whatever_a_model_wants_to_write_its_calls_are_those_that_are_allowed(
    name: str, setting: str, rules: CallRules
) -> None:
    style = format_named(TOOL_STYLES[name], setting)
    grammar = answer(name, style, rules)
    called = written = 0
    for seed in range(20):
        events = parsed(name, style, tempted(name, style, grammar.matcher(), seed), OFFERED)
        found = calls_of(events)
        assert len(found) <= (rules.max_calls or 128)
        for tool, arguments in found:
            index = NAMES.index(tool)
            assert index in rules.tools
            if index in rules.strict:
                Draft202012Validator(SCHEMA if index == 0 else {"maxProperties": 0}).validate(arguments)
        called += bool(found)
        written += any(isinstance(event, str) for event in events)
    assert called
    assert written


def is_allowed(name: str, style: ToolFormat, grammar: CompiledGrammar, texts: list[str]) -> bool:
    """Whether these texts are an answer as a whole."""
    ids = [*ids_of(name, style, *texts), end_of(name)]
    return grammar.matcher().consume(np.array(ids, np.int32)) == len(ids)


@pytest.mark.parametrize(("name", "setting"), STYLES)
def test_text_and_calls_of_the_allowed_tools_are_written_as_the_model_likes(name: str, setting: str) -> None:
    style = format_named(TOOL_STYLES[name], setting)
    grammar = answer(name, style, CallRules((0, 1), demanded=False, max_calls=2, strict=frozenset({0})))
    strict, free = (
        call(style, "get_weather", '{"days": 2, "city": "Köln"}'),
        call(style, "now", '{"x": [{}]}'),
    )
    is_llama = style.name == "llama3-json"
    between = "; " if is_llama else "\n"
    allowed: list[list[str]] = [
        [""],
        ['1 < 2, <tool> and\n\n</tool_call> are text: é {"name": '],
        ['{"answer": {"name": 1}}'],
        ["{}"],
        ["{ not JSON"],
        ["<tool"],
        strict,
        [*strict, between, *free],
        ["Well.", "<|python_tag|>", *free]
        if name == "Llama 3"
        else ["{1"]
        if is_llama
        else ["Well.\n", *free, "\n", *strict, "\nDone."],
    ]
    assert all(is_allowed(name, style, grammar, texts) for texts in allowed)
    refused: list[list[str]] = [
        call(style, "get_weather", '{"days": 3}'),
        call(style, "get_weather", '{"days": 1, "x": 1}'),
        call(style, "other", "{}"),
        [*strict, between, *free, between, *strict],
        ['{"n\\u0061me": "other", "parameters": {}}' if is_llama else "<tool_call>"],
        [' {"parameters": {}, "name": "other"}' if is_llama else "a<tool_call>b"],
        [*free, "\nDone."] if is_llama else ["<tool_call>", "\n", *free],
    ]
    assert not any(is_allowed(name, style, grammar, texts) for texts in refused)


@pytest.mark.parametrize(("name", "setting"), STYLES)
def test_the_number_of_demanded_calls_is_bounded_where_a_format_has_several(name: str, setting: str) -> None:
    style = format_named(TOOL_STYLES[name], setting)
    one, between = call(style, "now", "{}"), ["\n"]
    for most in (1, 2, 3, 128):
        grammar = engine(name).compile(GrammarSource("lark", style.grammar([TOOLS[1].parsed()], most)))
        counts = range(1, 5) if style.between else range(1, 2)
        for count in counts:
            texts = [*one, *(between + one) * (count - 1)]
            assert is_allowed(name, style, grammar, texts) == (count <= most)
        assert not is_allowed(name, style, grammar, ["text"])


def test_arguments_follow_the_schema_where_the_tool_is_strict_or_its_call_is_demanded() -> None:
    def schemas(rules: CallRules) -> dict[int, Any]:
        return {index: json.loads(tool.parameters or "null") for index, tool in rules.bound(TOOLS)}

    anything = {"type": "object"}
    assert schemas(CallRules((0, 2), demanded=False, strict=frozenset({0}))) == {0: SCHEMA, 2: anything}
    assert schemas(CallRules((0, 1), demanded=True)) == {0: SCHEMA, 1: None}
