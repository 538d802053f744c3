"""A FakeScheduler answers both clients as it was told, and records what it was asked."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import pytest
from paceline import Aborted, Client, Delta, Event, FinishReason, ToolCall, aio, errors
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc
from paceline.testing import FakeError, FakeLoss, FakeReply, FakeScheduler, FakeStall
from paceline.testing.replies import CODES


@pytest.fixture(scope="module")
def server() -> Iterator[FakeScheduler]:
    with FakeScheduler() as fake:
        yield fake


@pytest.fixture
def fake(server: FakeScheduler) -> FakeScheduler:
    server.forget()
    server.calls.clear()
    server.unanswered.clear()
    return server


def reached(client: Client) -> Client:
    """The client, once it is connected: on a machine that stands still, its attempts to connect time out."""
    while True:
        try:
            client.status()
        except errors.Unavailable:
            continue
        return client


@pytest.fixture(scope="module")
def connected(server: FakeScheduler) -> Iterator[Client]:
    with server.client() as client:
        yield reached(client)


@pytest.fixture
def client(fake: FakeScheduler, connected: Client) -> Client:
    return connected


def test_it_says_what_it_was_told_in_streams_and_at_once(fake: FakeScheduler, client: Client) -> None:
    fake.reply("Paris is it.", to="capital of France")
    fake.reply(FakeReply("Berlin", finish=FinishReason.LENGTH))
    (streamed,) = client.generate("The capital of France?").collect()
    unary = client.complete("The capital of France?")
    assert streamed.text == unary.text == "Paris is it."
    assert streamed.token_ids == unary.token_ids == tuple(b"Paris is it.")
    assert client.chat([{"role": "user", "content": "Of Germany?"}]).text == "Berlin"
    assert [event.text for event in client.generate("capital of France") if isinstance(event, Delta)] == [
        "Paris",
        " is",
        " it.",
    ]


async def test_the_asyncio_client_gets_the_same(fake: FakeScheduler) -> None:
    fake.reply("a b")
    async with fake.aio_client() as client:
        assert await client.generate("x", n=2).collect() == await client.completions("x", n=2)
        assert [event.text async for event in client.generate("x") if isinstance(event, Delta)] == ["a", " b"]


def test_reasoning_and_tool_calls_come_as_they_were_told(fake: FakeScheduler, client: Client) -> None:
    call = ToolCall("1", "weather", '{"city": "Köln"}')
    fake.reply(FakeReply("Let me see.", reasoning="Hm.", tool_calls=[call]))
    for answer in (client.chat([{"role": "user", "content": "?"}]), client.generate("?").collect()[0]):
        assert (answer.reasoning, answer.text, list(answer.tool_calls)) == ("Hm.", "Let me see.", [call])


def test_calls_are_recorded_with_all_that_came_with_them(fake: FakeScheduler, client: Client) -> None:
    fake.reply("yes")
    client.complete("Really?", temperature=0.5, max_tokens=3, request_id="mine", timeout_s=60)
    client.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Well?"}])
    client.tokenize("é")
    first, second, third = fake.calls
    assert (first.method, first.prompt, first.request_id, first.outcome) == (
        "GenerateUnary",
        "Really?",
        "mine",
        "answered",
    )
    assert (first.request.sampling.temperature, first.request.stop.max_tokens) == (0.5, 3)
    assert first.deadline_s is not None
    assert 0 < first.deadline_s <= 61  # gRPC rounds it up
    assert (second.prompt, second.deadline_s) == ("Well?", None)
    assert "user-agent" in second.metadata
    assert (third.method, third.prompt) == ("Tokenize", "é")


@pytest.mark.parametrize("reason", CODES)
def test_each_error_reaches_the_client_with_its_reason_and_retry_time(
    fake: FakeScheduler, client: Client, reason: str
) -> None:
    fake.reply(FakeError(reason, "as told", retry_after_s=0.25))
    with pytest.raises(errors.BY_CODE[CODES[reason]], match="as told") as caught:
        client.complete("x")
    assert (caught.value.code, caught.value.reason) == (CODES[reason], reason)
    if isinstance(caught.value, errors.RetryLater):
        assert caught.value.retry_after_s == 0.25
    assert fake.calls[-1].outcome == "failed"


def test_the_field_at_fault_is_told(fake: FakeScheduler, client: Client) -> None:
    fake.reply(FakeError("INVALID_REQUEST", "max_tokens: too large", field="stop.max_tokens"))
    with pytest.raises(errors.InvalidRequest) as caught:
        client.complete("x")
    assert caught.value.metadata["field"] == "stop.max_tokens"


def test_an_error_in_mid_stream_comes_behind_its_deltas(fake: FakeScheduler, client: Client) -> None:
    fake.reply(FakeReply("one two three", fault=FakeError("NOT_FINITE", after=2)))
    stream = client.generate("x")
    seen: list[Event] = []
    with pytest.raises(errors.InternalError) as caught:
        seen.extend(stream)
    assert [event.text for event in seen if isinstance(event, Delta)] == ["one", " two"]
    assert caught.value.reason == "NOT_FINITE"


def test_errors_are_told_to_so_many_calls(fake: FakeScheduler, client: Client) -> None:
    fake.reply(FakeError("QUEUE_FULL"), times=1)
    fake.reply("in")
    with pytest.raises(errors.QueueFull):
        client.complete("x")
    assert client.complete("x").text == "in"


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_lost_stream_is_continued_by_the_sdk_without_a_gap(
    fake: FakeScheduler, client: Client, after: int
) -> None:
    fake.reply(FakeReply("one two three", fault=FakeLoss(after=after, times=2)))
    stream = client.generate("x", n=2)
    assert [one.text for one in stream.collect()] == ["one two three"] * 2
    assert [call.wait() for call in fake.calls] == ["failed", "failed", "answered"]
    assert len({call.request_id for call in fake.calls}) == 1


async def test_a_stream_that_is_lost_for_good_is_lost(fake: FakeScheduler) -> None:
    fake.reply(FakeReply("one two three", fault=FakeLoss(after=1, times=100)))
    async with aio.Client(fake.address, failover_timeout_s=0) as client:
        with pytest.raises(errors.StreamLost):
            await client.generate("x").collect()


def test_a_continuation_of_something_else_is_refused(fake: FakeScheduler, client: Client) -> None:
    fake.reply(FakeReply("one two", fault=FakeLoss(after=1)), times=1)
    stream = client.generate("x")
    next(stream)
    fake.forget()
    fake.reply("other words")
    with pytest.raises(errors.StaleState, match="tokens that are not the fake reply's"):
        list(stream)
    assert fake.calls[-1].outcome == "failed"


def test_a_stall_lasts_until_the_client_leaves(fake: FakeScheduler, client: Client) -> None:
    fake.reply(FakeReply("one two", fault=FakeStall(after=1)))
    stream = client.generate("x")
    event = next(stream)
    assert isinstance(event, Delta)
    assert event.text == "one"
    assert fake.calls[0].outcome == "running"
    stream.close()
    assert fake.calls[0].wait() == "left"


def test_a_stall_ends_with_the_deadline(fake: FakeScheduler, client: Client) -> None:
    fake.reply(FakeStall())
    with pytest.raises(errors.DeadlineExceeded):
        client.complete("x", timeout_s=0.1)
    assert all(call.wait() == "left" for call in fake.calls)  # none if that took longer to connect


def test_abort_ends_a_stall(fake: FakeScheduler, client: Client) -> None:
    fake.reply(FakeReply("one two", fault=FakeStall(after=1)))
    stream = client.generate("x", request_id="mine")
    next(stream)
    assert client.abort(["mine", "other"]) == Aborted(("mine",), ("other",))
    with pytest.raises(errors.Cancelled) as caught:
        list(stream)
    assert caught.value.reason == "ABORTED"
    assert client.abort(["mine"]).unknown == ("mine",)


def test_delays_are_waited_and_a_client_that_leaves_meanwhile_is_noticed(
    fake: FakeScheduler, client: Client
) -> None:
    fake.reply(FakeReply("slow", first_delay_s=3600), to="first", times=1)
    fake.reply(FakeReply("one two", delay_s=3600), to="later")
    fake.reply(FakeReply("one two", first_delay_s=0.001, delay_s=0.001))
    first, later = client.generate("first"), client.generate("later")
    next(later)
    while len(fake.calls) < 2:
        time.sleep(0.001)
    for stream in (first, later):
        stream.close()
    assert [call.wait() for call in fake.calls] == ["left", "left"]
    assert client.complete("else").text == "one two"


def test_a_call_without_a_reply_fails_and_is_remembered(fake: FakeScheduler, client: Client) -> None:
    fake.reply("yes", to="^known")
    with pytest.raises(errors.InternalError, match=r"has no reply to 'unknown', or none left"):
        client.complete("unknown")
    assert [call.prompt for call in fake.unanswered] == ["unknown"]


def test_a_request_without_a_prompt_is_refused_by_its_field(fake: FakeScheduler) -> None:
    with grpc.insecure_channel(fake.address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="prompt: is required"):
            list(stub.Generate(pb.GenerateRequest()))


def test_it_tells_a_model_and_its_counts(fake: FakeScheduler, client: Client) -> None:
    fake.reply("yes", times=1)
    fake.reply(FakeError("INTERNAL"))
    client.complete("x")
    with pytest.raises(errors.InternalError):
        client.complete("x")
    status = client.status()
    assert (status.state, status.requests, status.finished, status.failed) == ("serving", 2, 1, 1)
    assert client.model_info().name == "fake"
    assert client.detokenize(client.tokenize("Köln")) == "Köln"


def test_what_it_does_not_have_is_unimplemented_without_a_traceback(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    for call in (client.executors, lambda: client.score(["x"])):
        with pytest.raises(errors.Unsupported):
            call()
    assert not caplog.records


def test_a_scheduler_that_was_stopped_is_unreachable_until_it_is_started_again_on_its_port() -> None:
    with FakeScheduler() as fake:
        fake.reply(["one", " two"])
        address = fake.address
        fake.stop()
        with Client(address) as client:
            with pytest.raises(errors.Unavailable):
                client.complete("x")
            fake.start()
            assert reached(client)
            assert fake.address == address
            with pytest.raises(RuntimeError, match="started before"):
                fake.start()
            assert client.complete("x").text == "one two"


def test_stopping_it_ends_a_stalled_stream() -> None:
    with FakeScheduler() as fake, Client(fake.address, failover_timeout_s=0) as client:
        fake.reply(FakeReply("one two", fault=FakeStall(after=1)))
        stream = reached(client).generate("x")
        next(stream)
        fake.stop()
        with pytest.raises(errors.StreamLost):
            list(stream)
        assert fake.calls[-1].wait() == "left"


def test_an_address_before_the_start_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="not started"):
        _ = FakeScheduler().address
