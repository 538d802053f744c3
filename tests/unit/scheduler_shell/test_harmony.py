"""Output in the harmony format, however it is cut: reasoning, text and calls as openai-harmony finds them.

`harmony_vectors.json` was written by openai-harmony 0.0.8: messages of the channel analysis joined by line
breaks are the reasoning, those with a recipient calls, all others text.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.scheduler.v1 import scheduler_pb2 as pb

from executor_service.contract.masks import allowed_tokens
from executor_service.grammar.source import GrammarSource
from scheduler_service.chat import harmony
from scheduler_service.chat.formats import FORMATS, MARKERS, format_of, whole_format_of
from scheduler_service.chat.harmony import HarmonyParser
from scheduler_service.chat.reading import ChatReading
from scheduler_service.errors import ErrorReason
from scheduler_service.rpc.codec.requests import check_request
from scheduler_service.streams.reading import chat_reading
from scheduler_service.text.chat_output import ChatOutput
from scheduler_service.text.detokenizer import Detokenizer
from scheduler_service.text.stop_strings import StopMatcher, StopStrings
from scheduler_service.text.vocabulary import Vocabulary
from scheduler_service.text.worker.pieces import pieces_of
from tests.support.untyped import present
from tests.unit.scheduler_shell.bad_ends import raises
from tests.unit.scheduler_shell.models_made_here import DRAFTING, MODEL
from tests.unit.scheduler_shell.test_call_parsers import calls_of, joined
from tests.unit.scheduler_shell.test_tool_formats import TOOLS, end_of, engine, matches_its_schema, parsed
from tests.unit.scheduler_shell.tool_styles import TOOL_STYLES

STYLE = TOOL_STYLES["gpt-oss"]
TOKENIZER = STYLE.tokenizer()
VOCABULARY = Vocabulary(pieces_of(TOKENIZER))
ADDED = STYLE.encoder.added_tokens(MARKERS)
FORMAT = present(format_of(STYLE.template, ADDED))
NAMES = frozenset({"get_weather", "now"})
VECTORS = json.loads(Path(__file__).with_name("harmony_vectors.json").read_text())
HARMONY = replace(MODEL, tool_format=FORMAT, whole_format=FORMAT, max_grammar_bytes=4000)
_SPELLED = re.compile("|".join(map(re.escape, ADDED)))


def bytewise(text: str) -> list[int]:
    """Token ids of a text: of each marker its token, of each other byte one."""
    ids, at = list[int](), 0
    for found in [*_SPELLED.finditer(text), None]:
        end = len(text) if found is None else found.start()
        for byte in text[at:end].encode():
            character = TOKENIZER.pre_tokenizer.pre_tokenize_str(bytes([byte]).decode("latin-1"))[-1][0][-1:]
            ids.append(_BYTES[byte] if byte > 127 else present(TOKENIZER.token_to_id(character)))
        if found is not None:
            ids.append(ADDED[found[0]])
            at = found.end()
    return ids


_BYTES = {VOCABULARY[id_][0]: id_ for id_ in range(TOKENIZER.get_vocab_size()) if len(VOCABULARY[id_]) == 1}


def output(*, continues: bool = False, stops: tuple[str, ...] = ()) -> ChatOutput:
    style = replace(FORMAT, parser=present(FORMAT.continued)) if continues else FORMAT
    matcher = StopMatcher(StopStrings(stops)) if stops else None
    reading = ChatReading(tool_format=style, tools={name: {} for name in NAMES})
    return ChatOutput(Detokenizer(VOCABULARY), matcher, reading, str, include_stop_string=False)


def read(*runs: list[int], **options: Any) -> tuple[str, str, list[list[str]], int]:
    """Reasoning, text, calls and the number of reasoning tokens."""
    one, reasoning, text = output(**options), "", ""
    calls: list[list[str]] = []
    for at, run in enumerate([*runs, None]):
        if run is None:
            one.flush()
        elif one.stop_string is None:
            one.push(run)
        taken = one.take()
        text, reasoning = text + taken[0], reasoning + taken[1]
        for call in taken[2]:
            if call.name:
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
        assert at <= len(runs)
    return reasoning, text, calls, one.reasoning_tokens


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_reasoning_text_and_calls_are_those_of_openai_harmony_cut_at_every_byte(vector: Any) -> None:
    ids = bytewise(vector["output"])
    whole = read(ids)
    assert whole[:3] == (vector["reasoning"], vector["text"], vector["calls"])
    assert read(*([id_] for id_ in ids)) == whole
    for cut in range(len(ids)):
        assert read(ids[:cut], ids[cut:]) == whole
    spelled = HarmonyParser(NAMES, by_id=False)
    events = joined([*spelled.push(vector["output"]), *spelled.flush()])
    assert calls_of([event for event in events if type(event).__name__ in ("CallBegins", "Arguments")]) == [
        (name, json.loads(arguments)) for name, arguments in vector["calls"]
    ]


def test_tokens_of_reasoning_are_counted_with_the_markers_around_it() -> None:
    analysis = "<|channel|>analysis<|message|>hm<|end|>"
    assert read(bytewise(f"{analysis}<|start|>assistant<|channel|>final<|message|>Yes"))[3] == 4
    assert read(bytewise("<|channel|>final<|message|>Yes"))[3] == 0


CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"


@pytest.mark.parametrize(
    ("text", "reasoning", "answer", "calls"),
    [
        ("Hello, no header", "", "Hello, no header", []),
        (" to", "", " to", []),
        (" to=f", "", " to=f", []),
        ("<|channel|>analysis", "", "<|channel|>analysis", []),
        ("<|channel|>other<|message|>x<|end|>", "", "<|channel|>other<|message|>x", []),
        (CALL.format("none", "{}"), "", CALL.format("none", "{}"), []),
        (CALL.format("now", "[1]"), "", CALL.format("now", "[1]"), []),
        (CALL.format("now", ""), "", CALL.format("now", ""), []),
        (CALL.format("now", '{"a": tru!}<|call|>'), "", "!}", [["now", '{"a": tru']]),
        (CALL.format("now", '{"a": "cut'), "", "", [["now", '{"a": "cut']]),
        (CALL.format("now", "{} and more"), "", " and more", [["now", "{}"]]),
        ("<|start|>user<|message|>I", "", "<|start|>user<|message|>I", []),
        ("<|end|>x<|end|><|end|>", "", "x\n<|end|>", []),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "a", "b", []),
        ("<|channel|>analysis<|message|>a<|message|>b", "a<|message|>b", "", []),
        ("<|channel|>" + "x" * 300, "", "<|channel|>" + "x" * 300, []),
        (
            "<|channel|>analysis to=python<|message|>1+1",
            "",
            "<|channel|>analysis to=python<|message|>1+1",
            [],
        ),
    ],
)
def test_what_can_not_be_read_is_text_and_nothing_is_lost(
    text: str, reasoning: str, answer: str, calls: list[list[str]]
) -> None:
    assert read(bytewise(text))[:3] == (reasoning, answer, calls)
    assert read(*([id_] for id_ in bytewise(text)))[:3] == (reasoning, answer, calls)


@pytest.mark.parametrize(("end", "is_header"), [("json", True), ("!", False), (" to=f !", False)])
def test_spaces_in_a_header_are_looked_at_once(
    monkeypatch: pytest.MonkeyPatch, end: str, is_header: bool
) -> None:
    """Shared out among the parts of a pattern, those of 256 characters took 0.1 s; these would take hours."""
    monkeypatch.setattr(harmony, "_MAX_HEADER", 1 << 20)
    text = f"<|channel|>final{30_000 * ' '}{end}{30_000 * ' '}<|message|>x"
    parser = HarmonyParser(NAMES, by_id=False)
    events = [*parser.push(text), *parser.flush()]
    assert "".join(map(str, events)) == ("x" if is_header else text)


parts = st.lists(
    st.sampled_from(
        [
            *ADDED,
            *("analysis", "final", "commentary", " to=functions.now ", " to=functions.get_weather", "json"),
            *(
                "assistant",
                '{"a": [1',
                "]}",
                "{}",
                '"',
                "\\",
                "\n",
                " ",
                "日",
                "text",
                "t",
                "to",
                "assist",
                "stop",
            ),
        ]
    ),
    max_size=14,
)


@settings(max_examples=120)
@given(parts=parts, sizes=st.lists(st.integers(1, 9), max_size=9), continues=st.booleans())
def test_hostile_output_is_the_same_however_it_is_split(
    parts: list[str], sizes: list[int], continues: bool
) -> None:
    ids = bytewise("".join(parts))
    runs, at = [], 0
    for size in [*sizes, len(ids)]:
        runs.append(ids[at : at + size])
        at += size
    whole = read(ids, continues=continues)
    assert read(*runs, continues=continues) == whole
    assert read(*([id_] for id_ in ids), continues=continues) == whole
    content = "".join(part for part in parts if part in ("日", "text", "{}"))
    told = "".join([whole[0], whole[1], *(arguments for _name, arguments in whole[2])])
    assert all(told.count(one) <= content.count(one) for one in ("日", "text"))


def test_stop_strings_are_looked_for_in_the_text_alone() -> None:
    text = "<|channel|>analysis<|message|>stop<|end|><|start|>assistant<|channel|>final<|message|>a stop b"
    assert read(bytewise(text), stops=("stop",))[:2] == ("stop", "a ")


def test_every_chat_is_read_and_a_continued_one_goes_on_with_its_text() -> None:
    for setting in ("auto", "none", "harmony"):
        assert whole_format_of(STYLE.template, ADDED, setting) is not None
        assert (format_of(STYLE.template, ADDED, setting) is None) == (setting == "none")
    assert whole_format_of(STYLE.template, {}) is None
    assert FORMATS["harmony"]({}) is None
    model = replace(HARMONY, tool_format=None)
    for continues, reasoning in ((False, "a"), (True, "")):
        turns = [pb.Message(role="user", content="x"), pb.Message(role="assistant", content="y")]
        messages = pb.Messages(messages=turns, continue_final_message=continues)
        checked = check_request(pb.GenerateRequest(messages=messages), model, DRAFTING)
        reading = present(chat_reading(checked, [1], model, VOCABULARY))
        one = ChatOutput(Detokenizer(VOCABULARY), None, reading, str, include_stop_string=False)
        one.push(bytewise("b" if continues else "<|channel|>analysis<|message|>a"))
        one.flush()
        assert one.take()[:2] == (("b", "") if continues else ("", reasoning))


def walk(grammar: str, seed: int) -> list[int]:
    """Ids of a random output of a grammar, which often writes a marker where it may."""
    rng, size, end = random.Random(seed), TOKENIZER.get_vocab_size(), end_of("gpt-oss")
    matcher, ids = engine("gpt-oss").compile(GrammarSource("lark", grammar)).matcher(), list[int]()
    markers = set(ADDED.values()) - {end}
    while True:
        allowed = np.flatnonzero(allowed_tokens(matcher.mask(), size)).tolist()
        if end in allowed and (len(allowed) == 1 or rng.random() < 0.7):
            return ids
        special = [token for token in allowed if token in markers]
        open_ = [token for token in allowed if token != end]
        ids.append(rng.choice(special if special and rng.random() < 0.4 else open_))
        assert matcher.consume(np.array(ids[-1:], np.int32)) == 1


@pytest.mark.parametrize("seed", range(8))
def test_demanded_and_strict_calls_match_their_schemas_behind_reasoning(seed: int) -> None:
    for grammar, demanded in ((FORMAT.grammar(TOOLS), True), (present(FORMAT.answer)(TOOLS, 1), False)):
        events = parsed("gpt-oss", FORMAT, walk(grammar, seed), TOOLS)
        found = calls_of([event for event in events if type(event).__name__ in ("CallBegins", "Arguments")])
        assert len(found) == 1 if demanded else len(found) <= 1
        assert all(matches_its_schema(tool, arguments) for tool, arguments in found)


def test_a_requests_grammar_is_of_the_answer_alone() -> None:
    def grammar_of(grammar: pb.Grammar) -> str:
        turns = pb.Messages(messages=[pb.Message(role="user", content="x")])
        checked = check_request(pb.GenerateRequest(messages=turns, grammar=grammar), HARMONY, DRAFTING)
        return present(checked.sampling.grammar).text

    schema = grammar_of(pb.Grammar(json_schema='{"enum": [1, "a:: %json"]}'))
    choices = grammar_of(pb.Grammar(choices=pb.Choices(choices=["yes", 'n"o'])))
    for seed in range(4):
        assert json.loads(read(walk(schema, seed))[1].split("\n")[-1]) in (1, "a:: %json")
        assert read(walk(choices, seed))[1].endswith(("yes", 'n"o'))
    with raises(ErrorReason.UNSUPPORTED, match="json_schema and choices") as caught:
        grammar_of(pb.Grammar(regex="a+"))
    assert caught.value.field == "grammar.regex"
    with raises(ErrorReason.INVALID_REQUEST, match="JSON") as caught:
        grammar_of(pb.Grammar(json_schema="{} start: x"))
    assert caught.value.field == "grammar.json_schema"
