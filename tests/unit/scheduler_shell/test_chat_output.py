"""A chat's output: reasoning, text and calls, however the tokens came, and wherever a stream was cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.chat.formats import format_of
from scheduler_service.chat.reading import ChatReading
from scheduler_service.chat.reasoning import Thinking, reasoning_markers
from scheduler_service.core.events import CompletionEnded, CompletionUsage, EndReason, Tokens
from scheduler_service.errors import ErrorReason
from scheduler_service.streams.completion import CompletionBuffer
from scheduler_service.streams.continuation import ReceivedText
from scheduler_service.streams.output import Output, OutputDelta, OutputEnd
from scheduler_service.streams.request import StreamOptions
from scheduler_service.streams.stream import call_id
from scheduler_service.text.chat_output import ChatOutput
from scheduler_service.text.detokenizer import Detokenizer
from scheduler_service.text.model_text import MARKERS
from scheduler_service.text.stop_strings import StopMatcher, StopStrings
from scheduler_service.text.vocabulary import Vocabulary
from scheduler_service.text.worker.pieces import pieces_of
from tests.support.untyped import present
from tests.unit.scheduler_shell.bad_ends import raises
from tests.unit.scheduler_shell.tool_styles import TOOL_STYLES

STYLE = TOOL_STYLES["Qwen3"]
TOKENIZER = STYLE.tokenizer()
VOCABULARY = Vocabulary(pieces_of(TOKENIZER))
ADDED = STYLE.encoder.added_tokens(MARKERS)
REASONING = reasoning_markers(STYLE.template, ADDED)
FORMAT = format_of(STYLE.template, ADDED)
END = present(TOKENIZER.token_to_id("<|im_end|>"))
ENDED = CompletionEnded("r", 0, EndReason.EOS, END, CompletionUsage(1, 0, 9, 0, 0, 0, 0.0, 0.0, 0.0))
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "日本"}}\n</tool_call>'


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def reading(thinking: Thinking = Thinking.OFF, *, tools: bool = True) -> ChatReading:
    reasoning = None if thinking is Thinking.OFF else REASONING
    return ChatReading(thinking, reasoning, FORMAT if tools else None, {"now": {}, "f": {}})


def buffer(how: ChatReading, stops: Sequence[str] = (), **options: bool) -> CompletionBuffer:
    matcher = StopMatcher(StopStrings(stops)) if stops else None
    output = ChatOutput(
        Detokenizer(VOCABULARY), matcher, how, lambda call: call_id("r", 0, call), include_stop_string=False
    )
    return CompletionBuffer(0, output, StreamOptions(**options))


@dataclass
class Got:
    """What a client has of a completion."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    calls: list[list[Any]] = field(default_factory=list)  # id, name, arguments
    reasoning_tokens: int | None = None

    def add(self, outputs: Sequence[Output]) -> Got:
        for one in outputs:
            if isinstance(one, OutputEnd):
                self.reasoning_tokens = one.reasoning_tokens
            elif isinstance(one, OutputDelta):
                self.ids += one.ids
                self.text += one.text
                self.reasoning += one.reasoning
                for call in one.calls:
                    if call.id:
                        assert call.index == len(self.calls)
                        self.calls.append([call.id, call.name, ""])
                    self.calls[call.index][2] += call.arguments
        return self

    @property
    def received(self) -> ReceivedText:
        arguments = tuple(len(call[2].encode()) for call in self.calls)
        return ReceivedText(len(self.text.encode()), len(self.reasoning.encode()), arguments)


def run(completion: CompletionBuffer, tokens: Sequence[int], got: Got, *, ends: bool = True) -> Got:
    """Each token in a step of its own, each step read, all sent at the end: what was read does not change."""
    taken: list[Output] = []
    for token in tokens:
        if completion.push(Tokens("r", 0, (token,)), frozenset({END})) is not None:
            break
        taken += completion.take(0.0)
    if ends:
        completion.finish(ENDED)
    return got.add(taken + completion.take(0.0))


def read(text: str, how: ChatReading, stops: Sequence[str] = ()) -> Got:
    return run(buffer(how, stops), ids(text), Got())


INSIDE, POSSIBLE, OFF = Thinking.INSIDE, Thinking.POSSIBLE, Thinking.OFF


@pytest.mark.parametrize(
    ("thinking", "text", "reasoning", "answer"),
    [
        (INSIDE, "hm\n\nso\n</think>\n\nYes.\n", "hm\n\nso", "Yes.\n"),
        (INSIDE, "<think>\nhm</think>Yes", "hm", "Yes"),
        (INSIDE, "cut of", "cut of", ""),
        (INSIDE, "cut\n\n", "cut\n\n", ""),
        (INSIDE, "</think>Yes", "", "Yes"),
        (POSSIBLE, "<think>\nhm\n</think>\n\nYes", "hm", "Yes"),
        (POSSIBLE, "\n <think>hm</think>Yes", "hm", "Yes"),
        (POSSIBLE, "Yes <think>x</think>", "", "Yes <think>x</think>"),
        (POSSIBLE, "\n\nYes</think>", "", "\n\nYes</think>"),
        (POSSIBLE, " \n", "", " \n"),
        (OFF, "<think>x</think>\n", "", "<think>x</think>\n"),
        (INSIDE, "a<think>b</think>c<think>d</think>", "a<think>b", "c<think>d</think>"),
        (INSIDE, f"{CALL}</think>Yes", CALL, "Yes"),
    ],
)
def test_what_stands_before_the_answer_is_reasoning(
    thinking: Thinking, text: str, reasoning: str, answer: str
) -> None:
    for tools in (True, False):
        got = read(text, reading(thinking, tools=tools))
        assert (got.reasoning, got.text, got.calls) == (reasoning, answer, [])
    tokens = ids(text)
    end = present(TOKENIZER.token_to_id("</think>"))
    behind = tokens.index(end) + 1 if end in tokens else len(tokens)
    assert got.reasoning_tokens == (behind if thinking is INSIDE or reasoning else 0)


def test_text_that_spells_a_marker_of_reasoning_is_text() -> None:
    spelled = [id_ for part in ("</th", "ink>") for id_ in ids(part)]
    got = run(buffer(reading(INSIDE)), [*ids("a"), *spelled, *ids("b</think>c")], Got())
    assert (got.reasoning, got.text) == ("a</think>b", "c")


def test_calls_come_beside_the_text_and_each_has_an_id_of_its_own() -> None:
    got = read(f"hm</think>\n\nI look.\n{CALL}\n{CALL}", reading(INSIDE))
    assert (got.reasoning, got.text) == ("hm", "I look.\n")
    arguments = '{"zone": "日本"}'
    assert got.calls == [[call_id("r", 0, at), "now", arguments] for at in (0, 1)]
    assert len({call_id(r, n, at) for r in "ab" for n in (0, 1) for at in (0, 1)}) == 8


def test_a_call_at_the_start_ends_the_wait_for_reasoning() -> None:
    got = read(f"\n{CALL}", reading(POSSIBLE))
    assert (got.text, len(got.calls), got.reasoning_tokens) == ("\n", 1, 0)


def test_stop_strings_are_looked_for_in_the_text_alone() -> None:
    got = read(f"stop</think>\n\nA {CALL} and stop, and {CALL}", reading(INSIDE), stops=["stop"])
    assert (got.reasoning, got.text) == ("stop", "A  and ")
    assert [call[1] for call in got.calls] == ["now"]
    in_arguments = '<tool_call>{"name": "f", "arguments": {"a": "stop"}}</tool_call> x'
    got = read(in_arguments, reading(), stops=["stop"])
    assert (got.calls[0][2], got.text) == ('{"a": "stop"}', " x")


def test_a_character_that_a_marker_cuts_is_a_replacement_character() -> None:
    cut = [*ids("日")[:-1], present(TOKENIZER.token_to_id("</think>")), *ids("x")]
    got = run(buffer(reading(INSIDE)), cut, Got())
    assert (got.reasoning, got.text) == ("\N{REPLACEMENT CHARACTER}", "x")


@pytest.mark.parametrize(("ids_too", "text_too"), [(True, False), (False, True)])
def test_the_client_gets_the_parts_that_it_wants(ids_too: bool, text_too: bool) -> None:
    tokens = ids(f"hm</think>Yes{CALL}")
    got = run(buffer(reading(INSIDE), ids=ids_too, text=text_too), tokens, Got())
    assert got.ids == (tokens if ids_too else [])
    assert (got.text, got.reasoning, len(got.calls)) == (("Yes", "hm", 1) if text_too else ("", "", 0))
    assert got.reasoning_tokens == len(ids("hm</think>"))


parts = st.lists(
    st.sampled_from(
        [
            *("<think>", "</think>", CALL, "\n", "日本", " text", "<tool_call>", "</tool_call>", "stop"),
            *('{"name": "f", "arguments": {"a": [1', '{"arguments": {}, "name": "f"}', "]", "}", "sto", '"'),
        ]
    ),
    max_size=6,
)


@settings(max_examples=25)
@given(parts=parts, thinking=st.sampled_from(Thinking), sizes=st.lists(st.integers(1, 9), max_size=9))
def test_any_split_of_the_tokens_gives_the_same_output(
    parts: list[str], thinking: Thinking, sizes: list[int]
) -> None:
    tokens = [id_ for part in parts for id_ in ids(part)]
    one_by_one = run(buffer(reading(thinking), ["stop"]), tokens, Got())
    completion, rest = buffer(reading(thinking), ["stop"]), tokens
    for size in [*sizes, len(tokens)]:
        if rest and completion.stop_string is None:
            completion.push(Tokens("r", 0, tuple(rest[:size])), frozenset({END}))
            rest = rest[size:]
    completion.finish(ENDED)
    got = Got().add(completion.take(0.0))
    if got.text == one_by_one.text and completion.stop_string is not None:
        got.ids = one_by_one.ids  # those after a stop string in the same step are sent too
        got.reasoning_tokens = one_by_one.reasoning_tokens
    assert got == one_by_one


@settings(max_examples=8)
@given(parts=parts, thinking=st.sampled_from(Thinking))
def test_a_stream_cut_behind_any_token_is_continued_with_exactly_the_rest(
    parts: list[str], thinking: Thinking
) -> None:
    tokens = [id_ for part in parts for id_ in ids(part)]
    whole = run(buffer(reading(thinking), ["stop"]), tokens, Got())
    for cut in range(len(tokens) + 1):
        first = buffer(reading(thinking), ["stop"])
        got = run(first, tokens[:cut], Got(), ends=False)
        if first.stop_string is not None:
            break
        resumed = buffer(reading(thinking), ["stop"])
        assert resumed.continue_after(tuple(tokens[:cut]), got.received, frozenset({END})) is None
        got = run(resumed, tokens[cut:], got)
        assert got == whole
        ended = run(buffer(reading(thinking), ["stop"]), tokens[:cut], Got())
        again = buffer(reading(thinking), ["stop"])
        again.continue_after(tuple(tokens[:cut]), ended.received, frozenset({END}))
        assert run(again, (), Got()).text == "", "all had been sent before the end"


@pytest.mark.parametrize(
    ("received", "problem"),
    [
        (ReceivedText(reasoning=4), "3 bytes of reasoning"),
        (ReceivedText(reasoning=1), "3 bytes of reasoning here, and 1 is no border"),
        (ReceivedText(arguments=(16, 0)), "1 tool calls"),
        (ReceivedText(arguments=(99,)), "bytes of arguments"),
        (ReceivedText(text=9), "bytes of text"),
    ],
)
def test_a_continuation_of_more_than_there_was_is_refused(received: ReceivedText, problem: str) -> None:
    tokens = tuple(ids(f"日</think>{CALL}"))
    with raises(ErrorReason.CONTINUATION, match=problem):
        buffer(reading(INSIDE)).continue_after(tokens, received, frozenset({END}))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>assistant\n", POSSIBLE),
        ("<|im_start|>assistant\n<think>\n", INSIDE),
        ("<|im_start|>assistant\n<think>", INSIDE),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", OFF),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", POSSIBLE),
        ("<think>hello", POSSIBLE),
        ("\n", POSSIBLE),
    ],
)
def test_the_prompts_last_tokens_tell_how_the_output_begins(prompt: str, expected: Thinking) -> None:
    assert REASONING is not None
    assert REASONING.thinking(ids(prompt), VOCABULARY) is expected


def test_a_continued_message_tells_by_its_content() -> None:
    assert REASONING is not None
    contents = {"<think>\nhm": INSIDE, "<think>a</think>b": OFF, "Well": OFF}
    assert {content: REASONING.thinking_in(content) for content in contents} == contents
