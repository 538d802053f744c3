"""Streams are ordered and gap-free, merge for slow readers, and end exactly once."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.chat.tools import CallRules, SentTool
from scheduler_service.core.events import Failed, Failure, Tokens
from scheduler_service.core.step import TopLogprobs
from scheduler_service.errors import ErrorReason
from scheduler_service.link.pool import Served
from scheduler_service.rpc.codec.output import output_message
from scheduler_service.streams.completion import MAX_DELTA_TOKENS
from scheduler_service.streams.continuation import prompt_digest
from scheduler_service.streams.output import OutputStart
from scheduler_service.streams.request import ChatPrompt, Prompt, TokenPrompt
from tests.support.untyped import present
from tests.unit.scheduler_shell import tokenizers_made_here as made
from tests.unit.scheduler_shell.bad_ends import raises
from tests.unit.scheduler_shell.stream_harness import (
    CALLER,
    LETTERS,
    MODEL,
    StreamHarness,
    checked,
    read,
    take,
    text_of,
)


async def test_a_reader_that_keeps_up_gets_each_token_and_one_end() -> None:
    harness = StreamHarness()
    stream = harness.admit(max_tokens=3)
    seen = []
    for token in (11, 12, 13):
        harness.step([token])
        seen += await take(stream)
    assert [list(message.delta.token_ids) for message in seen] == [[11], [12], [13], []]
    end = seen[-1].finished
    assert end.reason == pb.FINISH_REASON_LENGTH
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (2, 3)
    assert await take(stream) == []
    assert len(harness.streams) == 0


async def test_a_slow_reader_gets_merged_deltas_and_misses_nothing() -> None:
    harness = StreamHarness()
    stream = harness.admit(max_tokens=5)
    for token in range(11, 16):
        harness.step([token])
    messages = await read(stream)
    assert [list(message.delta.token_ids) for message in messages] == [[11, 12, 13, 14, 15], []]


async def test_each_pause_between_tokens_is_counted_even_if_deltas_are_merged() -> None:
    harness = StreamHarness()
    for id_ in ("a", "b"):
        harness.admit(id_, max_tokens=4)
    for now in (1.0, 1.5, 2.0, 4.0):
        harness.now = now
        harness.step()
    value = harness.metrics.registry.get_sample_value
    name = "paceline_scheduler_inter_token_seconds"
    assert value(f"{name}_bucket", {"le": "0.5"}) == 4
    assert (value(f"{name}_count"), value(f"{name}_sum")) == (6, 6.0)
    assert value("paceline_scheduler_first_token_seconds_sum") == 2.0


async def test_tokens_that_come_together_share_the_time_since_the_last_ones() -> None:
    harness = StreamHarness()
    stream = harness.admit(max_tokens=9)
    for harness.now, ids in ((1.0, (11,)), (1.4, (12, 13, 14, 15)), (1.5, (16,))):
        harness.streams.post([Tokens(stream.core_id, 0, ids)])
        harness.streams.deliver()
    value = harness.metrics.registry.get_sample_value
    name = "paceline_scheduler_token_seconds"
    assert value(f"{name}_count") == 5
    assert value(f"{name}_sum") == pytest.approx(0.5)
    assert value("paceline_scheduler_inter_token_seconds_count") == 2


async def test_a_delta_says_when_its_last_token_came() -> None:
    harness = StreamHarness()
    stream = harness.admit(max_tokens=4)
    elapsed = []
    for steps in ((1.0,), (1.5, 2.25), (4.0,)):
        for harness.now in steps:
            harness.step()
        harness.now += 1.0  # read later than it came
        elapsed += [message.delta.elapsed_us for message in await take(stream) if message.HasField("delta")]
    assert elapsed == [1_000_000, 2_250_000, 4_000_000]


async def test_a_very_slow_readers_delta_is_cut_into_messages_of_bounded_size() -> None:
    harness = StreamHarness()
    stream = harness.admit(max_tokens=8)
    completion = stream.completions[0]
    completion._ids = list(range(2 * MAX_DELTA_TOKENS + 1))
    completion._logprobs = [TopLogprobs(-1.0)] * len(completion._ids)
    messages = [output_message(one) for one in completion.take(0.0)]
    assert [len(message.delta.token_ids) for message in messages] == [MAX_DELTA_TOKENS] * 2 + [1]
    assert [len(message.delta.logprobs) for message in messages] == [MAX_DELTA_TOKENS] * 2 + [1]


async def test_completions_of_one_request_end_one_by_one() -> None:
    harness = StreamHarness()
    stream = harness.admit(n=3, max_tokens=2)
    while harness.step() is not None:
        pass
    messages = await read(stream)
    for index in range(3):
        own = [message for message in messages if message.index == index]
        assert sum(len(message.delta.token_ids) for message in own) == 2
        assert [message.WhichOneof("event") for message in own].count("finished") == 1
        assert own[-1].HasField("finished")


@given(st.lists(st.sampled_from(LETTERS), min_size=1, max_size=12), st.lists(st.booleans(), max_size=12))
def test_a_stop_string_ends_the_text_before_it_however_it_is_read(ids: list[int], reads: list[bool]) -> None:
    async def scenario() -> None:
        harness = StreamHarness()
        stream = harness.admit(text=True, strings=["abc", "ca"], max_tokens=len(ids))
        whole = "".join("abc"[LETTERS.index(id_)] for id_ in ids)
        messages: list[pb.GenerateResponse] = []
        for step, id_ in enumerate(ids):
            if harness.step([id_]) is None:
                break
            if step < len(reads) and reads[step] and stream._changed:
                messages += await take(stream)
        messages += await read(stream)
        ends = {stop: whole.find(stop) + len(stop) for stop in ("abc", "ca") if stop in whole}
        finished = messages[-1].finished
        if ends:
            stop = min(ends, key=lambda one: ends[one])
            assert text_of(messages) == whole[: ends[stop] - len(stop)]
            assert (finished.reason, finished.stop_string) == (pb.FINISH_REASON_STOP, stop)
        else:
            assert text_of(messages) == whole
            assert (finished.reason, finished.WhichOneof("matched")) == (pb.FINISH_REASON_LENGTH, None)
        assert len(harness.streams) == 0
        harness.core.check_integrity()

    asyncio.run(scenario())


@pytest.mark.parametrize("sizes", [(5,), (1, 4), (2, 3), (4, 1), (1, 1, 1, 1, 1)])
async def test_tokens_that_a_step_brings_behind_a_stop_string_are_dropped(sizes: tuple[int, ...]) -> None:
    harness = StreamHarness()
    stream = harness.admit(text=True, strings=["bc"], max_tokens=9)
    a, b, c = LETTERS
    ids = [a, b, c, a, b]
    for size in sizes:
        brought, ids = ids[:size], ids[size:]
        harness.streams.post([Tokens(stream.core_id, 0, tuple(brought))])
    harness.streams.deliver()
    messages = await read(stream)
    assert text_of(messages) == "a"
    assert [id_ for message in messages for id_ in message.delta.token_ids] == [a, b, c]
    finished = messages[-1].finished
    assert (finished.stop_string, finished.usage.completion_tokens) == ("bc", 3)


async def test_the_token_that_ends_a_completion_is_reported_and_has_no_text() -> None:
    harness = StreamHarness()
    stream = harness.admit(text=True, token_ids=[LETTERS[2]], max_tokens=9)
    for id_ in LETTERS:
        harness.step([id_])
    messages = await read(stream)
    assert text_of(messages) == "ab"
    assert [id_ for message in messages for id_ in message.delta.token_ids] == LETTERS
    assert messages[-1].finished.stop_token_id == LETTERS[2]


async def test_an_unfinished_character_is_sent_at_the_end() -> None:
    harness = StreamHarness()
    stream = harness.admit(text=True, max_tokens=2)
    half = [present(made.byte_level().token_to_id(piece)) for piece in "ðŁ"]
    harness.step(half[:1])
    harness.step(half[1:])
    assert text_of(await read(stream)) == "�"


@pytest.mark.parametrize(("had", "rest"), [(0, "ab�"), (2, "�"), (2 + len("�".encode()), "")])
async def test_a_stream_cut_just_before_its_end_continues_after_the_text_that_was_held_back(
    had: int, rest: str
) -> None:
    ids = [*LETTERS[:2], present(made.byte_level().token_to_id("ð"))]
    harness = StreamHarness()
    continued = pb.ContinuedCompletion(token_ids=ids, text_bytes=had)
    stream = harness.admit(text=True, max_tokens=3, strings=["bz"], continued=continued)
    harness.streams.deliver()
    messages = await read(stream)
    assert (text_of(messages), messages[-1].finished.reason) == (rest, pb.FINISH_REASON_LENGTH)


@pytest.mark.parametrize(("had", "rest"), [(1, "b"), (2, "")])
async def test_a_stream_cut_just_before_its_end_had_the_beginning_of_a_stop_string(
    had: int, rest: str
) -> None:
    harness = StreamHarness()
    continued = pb.ContinuedCompletion(token_ids=LETTERS[:2], text_bytes=had)
    stream = harness.admit(text=True, max_tokens=2, strings=["bz"], continued=continued)
    harness.streams.deliver()
    messages = await read(stream)
    assert (text_of(messages), messages[-1].finished.reason) == (rest, pb.FINISH_REASON_LENGTH)


async def test_a_cancelled_request_ends_with_its_error_after_what_was_delivered() -> None:
    harness = StreamHarness()
    stream = harness.admit(max_tokens=9)
    harness.step([11])
    assert harness.streams.abort("r", "ours", "aborted")
    assert [list(message.delta.token_ids) for message in await take(stream)] == [[11]]
    with raises(ErrorReason.ABORTED):
        await take(stream)
    assert not harness.streams.abort("r", "ours", "again")
    plan = harness.core.plan(harness.now)
    assert plan is not None  # nothing but the release of its cache
    assert (plan.releases, plan.rows, plan.openings) != ((), (), ())
    assert (plan.rows, plan.openings) == ((), ())


async def test_a_stream_begins_with_what_is_needed_to_continue_it() -> None:
    harness = StreamHarness()
    stream = harness.admit(max_tokens=2)
    harness.step([11])
    first, *_ = map(output_message, await stream.take())
    started = first.started
    assert (started.request_id, started.model, started.prompt_tokens) == ("r", "small", 2)
    assert (started.max_tokens, started.continued_tokens) == (2, 0)
    assert started.prompt_digest == prompt_digest([1, 2])
    assert (started.model_fingerprint, started.sampler) == (b"model", "sampler-1")
    resolved = {field.name for field, _ in started.sampling.ListFields()}
    assert resolved >= {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"}
    harness.step([12])
    assert not any(isinstance(one, OutputStart) for one in await stream.take())


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (TokenPrompt(array("I", [1, 2])), "grammar"),
        (ChatPrompt(({"role": "user", "content": "x"},), tools=(SentTool("f", "", ""),)), "grammar"),
        (
            ChatPrompt(
                ({"role": "user", "content": "x"},),
                tools=(SentTool("f", "", ""),),
                calls=CallRules((0,), True),
            ),
            "messages.tools",
        ),
    ],
)
def test_a_grammar_that_fails_in_mid_stream_is_named_by_the_field_that_it_was_made_of(
    prompt: Prompt, field: str
) -> None:
    harness = StreamHarness()
    request = replace(checked("r"), prompt=prompt)
    stream = harness.streams.admit(
        request, [1, 2], CALLER, arrival=0.0, deadline=None, served=Served(MODEL, None)
    )
    harness.streams.post([Failed(stream.core_id, Failure.GRAMMAR, "it is stuck", emitted=True)])
    harness.streams.deliver()
    assert stream.error is not None
    assert (stream.error.field, stream.error.message) == (field, f"{field}: it is stuck")
