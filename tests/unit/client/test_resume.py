"""A stream cut anywhere, any number of times, and continued, is the stream that was never cut."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline import errors
from paceline.chat import Message
from paceline.collector import Collector
from paceline.requests import generate_request
from paceline.resume import ResumableStream, identified
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.types import Completion, Event, Finished

from tests.unit.client.ideal_scheduler import Output, ids_of, output_of, prompt_logprobs_of, replies


def stream_of(*, chat: bool = False, **options: object) -> ResumableStream:
    """Of a chat: with reasoning and tool calls."""
    prompt, messages = (None, [Message("user", "x")]) if chat else ("x", None)
    return ResumableStream(identified(generate_request(prompt, messages, None, options)))


def read(stream: ResumableStream, draw: random.Random, cuts: list[int]) -> list[Event]:
    """The events of as many attempts as there are cuts, each after so many messages, and of a last one."""
    events: list[Event] = []
    for attempt, cut in enumerate([*cuts, None]):
        request = stream.attempt(float(attempt))
        for message in list(replies(request, draw, cached_tokens=attempt))[:cut]:
            event = stream.see(message)
            events += [] if event is None else [event]
        if stream.is_complete:
            break
    stream.check_end()
    return events


def whole(events: list[Event]) -> list[Completion]:
    collector = Collector()
    for event in events:
        collector.add(event)
    return collector.completions()


def without_usage(completion: Completion) -> Completion:
    assert completion.finished is not None
    usage = replace(completion.finished.usage, cached_tokens=0, first_token_ms=0, total_ms=0)
    return replace(completion, finished=replace(completion.finished, usage=usage))


@given(
    seed=st.integers(0, 2**64 - 1),
    n=st.integers(1, 3),
    returns=st.sampled_from(["both", "text", "token_ids"]),
    chat=st.booleans(),
    of_adapter=st.booleans(),
    cuts=st.lists(st.integers(0, 8), max_size=4),
    draw=st.randoms(use_true_random=False),
)
def test_a_stream_that_is_cut_and_continued_is_the_one_that_was_not(
    seed: int, n: int, returns: str, chat: bool, of_adapter: bool, cuts: list[int], draw: random.Random
) -> None:
    options = {"seed": seed, "n": n, "returns": returns, "logprobs": 1, "prompt_logprobs": 0}
    options |= {"model": "an adapter"} if of_adapter else {}
    undisturbed = whole(read(stream_of(chat=chat, **options), draw, []))
    stream = stream_of(chat=chat, **options)
    events = read(stream, draw, cuts)
    assert [without_usage(one) for one in whole(events)] == [without_usage(one) for one in undisturbed]
    assert [one.logprob for one in stream.prompt_logprobs] == prompt_logprobs_of(seed)
    assert sum(isinstance(event, Finished) for event in events) == n
    deltas = [event for event in events if not isinstance(event, Finished)]
    assert all(one.token_ids or one.text or one.reasoning or one.tool_calls for one in deltas)
    if returns == "text":
        assert not any(one.token_ids or one.logprobs for one in undisturbed)
    else:
        assert [list(one.token_ids) for one in undisturbed] == [ids_of(seed, i, 10) for i in range(n)]
    if returns != "token_ids":
        for index, one in enumerate(undisturbed):
            ids = ids_of(seed, index, 10)
            arguments = tuple(call.arguments.encode() for call in one.tool_calls)
            received = Output(one.reasoning.encode(), one.text.encode(), arguments)
            assert received == output_of(ids, len(ids), chat=chat)


def test_until_something_was_received_the_very_same_request_is_sent_again() -> None:
    stream = stream_of()
    first = stream.attempt(0.0).SerializeToString(deterministic=True)
    request = pb.GenerateRequest.FromString(first)
    assert request.request_id
    assert request.sampling.HasField("seed")
    stream.see(next(replies(request, random.Random(0))))  # Started came, and then the connection broke
    assert stream.attempt(1.0).SerializeToString(deterministic=True) == first
    assert stream.resumptions == 0


def test_what_the_caller_chose_is_kept() -> None:
    request = identified(generate_request("x", None, None, {"seed": 0, "request_id": "mine"}))
    assert (request.request_id, request.sampling.seed) == ("mine", 0)


def test_times_count_from_the_first_attempt_and_cached_tokens_are_its() -> None:
    stream = stream_of(seed=3)
    events = read(stream, random.Random(1), [2])
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.usage.cached_tokens, end.usage.total_ms) == (0, 1000 + len(ids_of(3, 0, 10)))
    times = [event.elapsed_us for event in events if not isinstance(event, Finished)]
    assert times == sorted(times)
    assert times[-1] > 1_000_000
    assert end.usage.first_token_ms == times[0] // 1000
    assert stream.resumptions == 1


def part(first: int, count: int) -> pb.GenerateResponse:
    scores = [pb.TokenLogprobs(logprob=-1)] * count
    return pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(first=first, logprobs=scores))


@pytest.mark.parametrize("parts", [[], [part(1, 2)], [part(2, 3)], [part(1, 2), part(2, 2)], [part(1, 4)]])
def test_logprobs_of_a_prompt_that_are_not_whole_raise(parts: list[pb.GenerateResponse]) -> None:
    stream = stream_of(prompt_logprobs=0)
    stream.attempt(0.0)
    stream.see(pb.GenerateResponse(started=pb.Started(prompt_tokens=4)))
    messages = [*parts, pb.GenerateResponse(delta=pb.Delta(token_ids=[1]))]
    with pytest.raises(errors.InternalError, match="logprobs of the prompt"):
        list(map(stream.see, messages))


def test_a_scheduler_without_the_adapter_is_named_as_the_one_that_could_not_continue() -> None:
    stream = stream_of(model="a")
    for message in list(replies(stream.attempt(0.0), random.Random(1)))[:2]:
        stream.see(message)
    stream.attempt(1.0)
    told = stream.final_error(errors.NotFound("model: 'a' is not served", reason="MODEL_NOT_FOUND"), "b:1")
    assert isinstance(told, errors.NotFound)
    assert "could not be continued: model: 'a' is not served (b:1)" in str(told)


CALLS = [
    [pb.ToolCallDelta(index=1, id="b", name="f")],
    [pb.ToolCallDelta(arguments="{")],
    [pb.ToolCallDelta(id="a", name="f"), pb.ToolCallDelta(id="a", name="f")],
]


@pytest.mark.parametrize("calls", CALLS, ids=["no first", "no name", "two beginnings"])
def test_a_tool_call_begins_once_and_in_its_turn(calls: list[pb.ToolCallDelta]) -> None:
    stream = stream_of(chat=True)
    stream.attempt(0.0)
    with pytest.raises(errors.InternalError, match="tool call"):
        stream.see(pb.GenerateResponse(delta=pb.Delta(tool_calls=calls)))


@pytest.mark.parametrize("continued", [0, 1])
def test_a_scheduler_that_ignores_the_continuation_ends_the_stream(continued: int) -> None:
    stream = stream_of(seed=3)
    begun = list(replies(stream.attempt(0.0), random.Random(1)))[:3]
    assert sum(len(message.delta.token_ids) for message in begun) > 1
    for message in begun:
        stream.see(message)
    stream.attempt(1.0)
    with pytest.raises(errors.StreamLost, match="knows no continuations"):
        stream.see(pb.GenerateResponse(started=pb.Started(continued_tokens=continued)))


def test_no_stream_is_continued_by_another_model() -> None:
    stream = stream_of(seed=3)
    begun = list(replies(stream.attempt(0.0), random.Random(1)))[:3]
    for message in begun:
        stream.see(message)
    first = next(replies(stream.attempt(1.0), random.Random(1)))
    first.started.model_fingerprint = b"another model"
    with pytest.raises(errors.StreamLost, match="another model"):
        stream.see(first)


def test_a_scheduler_that_starts_anew_without_a_word_ends_the_stream() -> None:
    stream = stream_of(seed=3)
    for message in list(replies(stream.attempt(0.0), random.Random(1)))[:3]:
        stream.see(message)
    stream.attempt(1.0)
    with pytest.raises(errors.StreamLost, match="took over 0 of"):
        stream.see(pb.GenerateResponse(delta=pb.Delta(token_ids=[1])))


def test_a_stream_of_a_scheduler_that_said_nothing_to_continue_it_by_is_lost() -> None:
    stream = stream_of()
    stream.attempt(0.0)
    stream.see(pb.GenerateResponse(delta=pb.Delta(token_ids=[1])))
    with pytest.raises(errors.StreamLost, match="too old"):
        stream.attempt(1.0)


def test_after_the_first_event_no_error_tells_the_caller_to_try_again() -> None:
    stream = stream_of()
    refused = errors.QueueFull("the queue is full", retry_after_s=1.0)
    assert stream.final_error(refused, "b:1") is refused
    for message in list(replies(stream.attempt(0.0), random.Random(1)))[:2]:
        stream.see(message)
    for error in (refused, errors.Unavailable("gone"), errors.DuplicateRequest("request_id: is live")):
        told = stream.final_error(error, "b:1")
        assert isinstance(told, errors.StreamLost)
        assert not isinstance(told, errors.RetryLater)
        assert "b:1" in str(told)
    aborted = errors.Cancelled("aborted")
    assert stream.final_error(aborted, "b:1") is aborted
