"""Calls as chat templates write them, read back however the output was cut."""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from executor_service.grammar.source import GrammarSource
from scheduler_service.chat.argument_texts import argument_as_json, text_arguments
from scheduler_service.chat.call_grammar import ToolGrammarError
from scheduler_service.chat.formats import ToolFormat
from scheduler_service.chat.reading import ChatReading
from scheduler_service.chat.tools import OfferedTool
from scheduler_service.streams.stream import call_id
from scheduler_service.text.chat_output import ChatOutput
from scheduler_service.text.detokenizer import Detokenizer
from scheduler_service.text.vocabulary import Vocabulary
from scheduler_service.text.worker.pieces import pieces_of
from scheduler_service.text.worker.sent_json import texts_of_tools
from tests.support.untyped import present
from tests.unit.scheduler_shell.test_call_parsers import calls_of
from tests.unit.scheduler_shell.test_tool_formats import TOOLS as WEATHER
from tests.unit.scheduler_shell.test_tool_formats import (
    end_of,
    engine,
    format_named,
    matches_its_schema,
    parsed,
    walk,
)
from tests.unit.scheduler_shell.tool_styles import TOOL_STYLES
from tests.unit.scheduler_shell.tool_styles import call as sent_call

NAMES = [
    *("Qwen3", "Hermes", "Qwen3-Coder", "Seed-OSS", "GLM-4.5", "markers of GLM as text", "MiniMax-M2"),
    *("Granite 3", "Mistral", "Ministral 3"),
]
styles = pytest.mark.parametrize("name", NAMES)
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "kind": {"$ref": "#/$defs/kind"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "object": {"type": "object"},
    },
    "$defs": {"kind": {"enum": ["a", "null", "7"]}},
}
TOOLS = [OfferedTool("put", "", PARAMETERS), OfferedTool("now", "", {"type": "object", "properties": {}})]
TEXTS = {tool.name: text_arguments(tool.parameters) for tool in TOOLS}
ARGUMENTS: list[dict[str, Any]] = [
    {"text": "Köln"},
    {"text": ""},
    {"text": "7"},
    {"text": "null", "note": None},
    {"text": "true", "flag": True},
    {"text": '{"a": 1}'},
    {"text": '"quoted"'},
    {"text": "two\nlines\n\n  and more"},
    {"text": "\n", "note": "\n\n"},
    {"text": "a < b > c </ d <parameter </arg_ <parameter=x"},
    {"text": "back\\slash \t tab"},
    {"text": "日本 \N{GRINNING FACE}"},
    {"text": "<b>bold</b> & </i>"},
    {"kind": "null"},
    {"kind": "7", "count": 7},
    {"note": "1"},
    {"note": "nullable"},
    {"either": 5},
    {"either": "five"},
    {"count": -12},
    {"share": 2.5},
    {"share": 1e-9, "flag": False},
    {"list": [1, "two", None, [True]]},
    {"list": []},
    {"object": {"a": {"b": ["c"]}, "d": "é"}},
    {"object": {}},
    {"extra": {"x": 1}},
    {"extra": "of no schema"},
    {"text": "x" * 40, "count": 0, "list": ["</parameter >"], "object": {"": ""}},
    {"flag": True, "text": "last"},
]


@dataclass(frozen=True)
class Family:
    """A format with its tokenizer, whose outputs are read."""

    name: str

    @functools.cached_property
    def style(self) -> ToolFormat:
        return format_named(TOOL_STYLES[self.name])

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(pieces_of(TOOL_STYLES[self.name].tokenizer()))

    @functools.cached_property
    def bytes(self) -> dict[bytes, int]:
        pieces = (
            (self.vocabulary[id_], id_) for id_ in range(TOOL_STYLES[self.name].tokenizer().get_vocab_size())
        )
        return {piece: id_ for piece, id_ in pieces if len(piece) == 1}

    def ids(self, text: str) -> list[int]:
        """Of each marker that is a token its id, of each other byte one."""
        markers = {text: id_ for id_, text in self.style.markers.items()}
        parts = re.split(f"({'|'.join(map(re.escape, markers))})", text) if markers else [text]
        ids: list[int] = []
        for part in parts:
            ids += (
                [markers[part]] if part in markers else [self.bytes[bytes([byte])] for byte in part.encode()]
            )
        return ids

    def read(self, *runs: list[int]) -> tuple[str, list[list[str]]]:
        """Text and calls of an output that came in these runs."""
        reading = ChatReading(tool_format=self.style, tools=TEXTS)
        output = ChatOutput(Detokenizer(self.vocabulary), None, reading, str, include_stop_string=False)
        text, calls = "", list[list[str]]()
        for run in [*runs, None]:
            output.flush() if run is None else output.push(run)
            taken = output.take()
            text += taken[0]
            for piece in taken[2]:
                if piece.name:
                    calls.append([piece.name, ""])
                calls[piece.index][1] += piece.arguments
        return text, calls

    def written(self, content: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
        """An answer with calls as the family's chat template writes it."""
        style = TOOL_STYLES[self.name]
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=style.tokenizer(), chat_template=style.template)
        tokenizer.bos_token = style.bos or None
        sent = [sent_call(tool, arguments, "call12345") for tool, arguments in calls]
        user = {"role": "user", "content": "x"}
        turns: list[Any] = [user, {"role": "assistant", "content": content, "tool_calls": sent}]
        offered: list[Any] = [tool.for_template() for tool in TOOLS]
        before: Any = tokenizer.apply_chat_template(
            turns[:1], tools=offered, tokenize=False, add_generation_prompt=True
        )
        whole: Any = tokenizer.apply_chat_template(turns, tools=offered, tokenize=False)
        assert whole.startswith(before)
        return re.sub(
            r"(<\|im_end\|>\n|<seed:eos>|\[e~\[\n|<\|end_of_text\|>\n|</s>)$", "", whole[len(before) :]
        )


FAMILIES = {name: Family(name) for name in NAMES}


def vector(name: str, at: int) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """What a model says before its calls, and these."""
    calls = [("put", ARGUMENTS[at])]
    if at % 5 == 4:
        calls.append(("now", {}))
    if at % 7 == 6:
        calls = [("now", {}), *calls, ("put", ARGUMENTS[at - 1])]
    says = "" if at % 2 or name in ("Hermes", "Mistral") else "I look é"
    return says, calls


@styles
def test_calls_are_read_as_the_template_writes_them_cut_at_every_byte(name: str) -> None:
    family = FAMILIES[name]
    for at in range(len(ARGUMENTS)):
        says, calls = vector(name, at)
        ids = family.ids(family.written(says, calls))
        whole = family.read(ids)
        assert whole[0].strip() == says, (at, whole)
        read = [(tool, json.loads(arguments)) for tool, arguments in whole[1]]
        assert read == calls, at
        assert family.read(*([id_] for id_ in ids)) == whole
        for cut in range(0, len(ids), 1 if at % 6 == 0 else 7):
            assert family.read(ids[:cut], ids[cut:]) == whole


@styles
@settings(max_examples=25)
@given(data=st.data())
def test_any_split_of_any_output_gives_the_same_and_nothing_crashes(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    text = family.written("é", [("put", {"text": "a\nb", "count": 5}), ("now", {})])
    stray = [*family.style.markers.values(), "{", '"', "</", "<", "\n", "]"]
    parts = re.findall(r"\s+|\w+|[^\w\s]", text) + stray
    pieces = data.draw(st.lists(st.sampled_from(parts), max_size=20))
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    ids = family.ids(text[:start] + "".join(pieces) + text[end:])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=8)) | {0, len(ids)})
    whole = family.read(ids)
    assert family.read(*(ids[one:two] for one, two in itertools.pairwise(cuts))) == whole
    assert family.read(*([id_] for id_ in ids)) == whole
    assert all(tool in TEXTS for tool, _arguments in whole[1])


@styles
def test_what_is_no_call_of_an_offered_tool_is_text_as_it_came(name: str) -> None:
    family = FAMILIES[name]
    call = family.written("", [("put", {"text": "x"})])
    for text in (call.replace("put", "other"), call[: call.index("put") + 2], "just text < \n", ""):
        assert family.read(family.ids(text))[1] == []
        assert family.read(family.ids(text))[0] == text


def operations(family: Family, ids: list[int]) -> int:
    """Calls of functions while an output is read token by token."""
    count = 0

    def counted(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        family.read(*([id_] for id_ in ids))
    finally:
        sys.setprofile(None)
    return count


@styles
def test_hostile_outputs_take_work_in_proportion_to_their_length(name: str) -> None:
    family = FAMILIES[name]
    call = family.written("", [("put", {"text": "x"})])
    begin = call[: call.index("put")]
    value = call[: call.index("x")]
    for head, more in (
        (begin, " "),
        (begin, "a"),
        (value, "<"),
        (value, "x\n"),
        ("", begin),
        ("", call),
        (begin, "[{"),
    ):
        few, many = (operations(family, family.ids(head + more * n)) for n in (60, 240))
        assert many < 5 * few, (head, more)


def test_a_tools_schema_says_which_arguments_may_be_texts() -> None:
    put = TEXTS["put"]
    assert put.keys() == {"text", "kind", "note", "either"}
    assert [put["text"], put["note"], put["either"]] == [set(), {"null"}, {"integer"}]
    assert TEXTS["now"] == {}
    sent = json.dumps([(tool.name, "", json.dumps(tool.parameters)) for tool in TOOLS]).encode()
    assert {
        tool: {key: frozenset(others) for key, others in texts.items()}
        for tool, texts in json.loads(texts_of_tools(sent)).items()
    } == TEXTS
    loop = {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}
    assert text_arguments(loop) == {}
    assert text_arguments({"properties": {"a": {"$ref": "#/nowhere"}, "b": True, "c": {"type": 5}}}) == {}
    assert argument_as_json("True", None) == "true"
    assert argument_as_json("1" * 5000, frozenset({"integer"})) == json.dumps("1" * 5000)


def test_what_a_grammar_of_texts_can_not_promise_is_told() -> None:
    style = format_named(TOOL_STYLES["Qwen3-Coder"])
    for schema, problem in (
        ({"type": "string", "pattern": "a+"}, "'pattern' can't be demanded"),
        ({"type": ["string", "integer"], "maxLength": 3}, "a length"),
        ({"type": "string", "maxLength": "x"}, "lengths must be integers"),
        ({"enum": ["x</parameter>"]}, "has </parameter> in it"),
        ({"enum": ["5", 5]}, "read as another value"),
        ({"type": "string", "enum": 5}, "enum must be a list of values"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "of a text and null"),
    ):
        with pytest.raises(ToolGrammarError, match=problem):
            style.grammar([OfferedTool("f", "", {"properties": {"a": schema}})], 1)
    with pytest.raises(ToolGrammarError, match="between tags"):
        style.grammar([OfferedTool("f", "", {"properties": {"a>b": {"type": "string"}}})], 1)


def test_ids_of_calls_are_those_that_the_template_takes() -> None:
    assert format_named(TOOL_STYLES["Mistral"]).short_ids
    assert re.fullmatch("[0-9a-z]{9}", call_id("r", 0, 1, short=True))
    assert call_id("r", 0, 1) == call_id("r", 0, 1)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("Qwen3", "Hermes")])
def test_answers_with_restricted_calls_have_text_and_calls_that_match_their_schemas(name: str) -> None:
    family = FAMILIES[name]
    lark = present(family.style.answer)(WEATHER, 2)
    texts = 0
    for seed in range(8):
        ids = walk(name, lark, seed)
        events = parsed(name, family.style, ids, WEATHER)
        found = calls_of([event for event in events if not isinstance(event, str)])
        assert len(found) <= 2
        assert all(matches_its_schema(tool, arguments) for tool, arguments in found)
        texts += any(isinstance(event, str) for event in events)
    assert texts
    grammar = engine(name).compile(GrammarSource("lark", lark))
    one = ("get_weather", {"days": 7})
    outputs = {1: [one], 2: [one, ("now", {})], 3: [one, one, one]}
    for count, calls in outputs.items():
        if name == "Mistral" or (name == "MiniMax-M2" and count > 1):
            break  # the template writes an id, or several calls in one block
        ids = [*family.ids(family.written("", calls).lstrip("\n")), end_of(name)]
        assert (grammar.matcher().consume(np.array(ids, np.int32)) == len(ids)) == (count <= 2), calls
    other = family.ids(family.written("", [("put", {"text": "x"})]))
    assert grammar.matcher().consume(np.array(other, np.int32)) < len(other)
