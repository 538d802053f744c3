"""What the public contract says beyond Generate's tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from paceline import errors
from paceline.scheduler.v1 import admin_pb2, admin_pb2_grpc
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

from tests.support.stack import Stack, oracle_stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with oracle_stack(tmp_path_factory.mktemp("stack"), executor=["--step-ms", "1"]) as stack:
        yield stack


@pytest.fixture
async def channel(stack: Stack) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(stack.client().addresses[0]) as channel:
        yield channel


UNSUPPORTED = [
    pb.GenerateRequest(ttft_ms=5),
    pb.GenerateRequest(tpot_ms=5),
    pb.GenerateRequest(messages=pb.Messages(messages=[pb.Message(role="assistant", reasoning="r")])),
    pb.GenerateRequest(messages=pb.Messages(tools=[pb.Tool(name="t")])),
    pb.GenerateRequest(messages=pb.Messages(tool_choice=pb.ToolChoice(name="t"))),
    pb.GenerateRequest(messages=pb.Messages(messages=[pb.Message(role="tool", tool_call_id="1")])),
    pb.GenerateRequest(
        messages=pb.Messages(messages=[pb.Message(role="assistant", tool_calls=[pb.ToolCall(name="t")])])
    ),
]


@pytest.mark.parametrize("message", UNSUPPORTED, ids=lambda message: str(message)[:40])
async def test_a_field_whose_feature_is_missing_is_refused_by_name(
    channel: grpc.aio.Channel, message: pb.GenerateRequest
) -> None:
    if message.WhichOneof("prompt") is None:
        message.text = "x"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await SchedulerServiceStub(channel).Generate(message).read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    error = errors.from_status(
        caught.value.code(), caught.value.details() or "", caught.value.trailing_metadata()
    )
    assert error.reason == "UNSUPPORTED"
    assert error.metadata["field"] in (caught.value.details() or "")


async def test_another_model_is_not_found_and_ours_is(stack: Stack) -> None:
    client = stack.client()
    name = (await client.model_info()).name
    assert (await client.completions("x", model=name, max_tokens=1))[0].token_ids
    with pytest.raises(errors.NotFound, match="nobody"):
        await client.completions("x", model="nobody", max_tokens=1)


async def test_the_waits_of_a_request_add_up_to_its_time_in_the_queue_and_are_known_afterwards(
    stack: Stack,
) -> None:
    client = stack.client()
    completions = await asyncio.gather(
        *(client.completions("x", request_id=f"w{i}", max_tokens=9, ignore_eos=True) for i in range(40))
    )
    for i, [completion] in enumerate(completions):
        assert completion.finished is not None
        usage = completion.finished.usage
        assert sum(usage.queue_waits.values()) == pytest.approx(1000 * usage.queue_ms, abs=600)
        [known] = (await client.why(f"w{i}")).requests
        assert (known.phase, known.queue_waits) == ("ended", usage.queue_waits)
    assert {"callers_turn", "tokenizing"} <= set((await client.status()).waits)


async def test_the_log_has_each_step_of_a_request_from_its_queueing_to_its_end(
    stack: Stack, channel: grpc.aio.Channel
) -> None:
    [completion] = await stack.client().completions("x", request_id="logged", max_tokens=9, ignore_eos=True)
    events: list[tuple[int, int]] = []  # of this request: kind and value
    async for message in SchedulerServiceStub(channel).WatchSteps(pb.WatchStepsRequest(), timeout=60):
        log = message.log
        ours = {one.number for one in log.names if one.request_id == "logged"}
        columns = zip(log.event_kinds, log.event_requests, log.event_values, strict=True)
        events += [(kind, value) for kind, request, value in columns if request in ours]
        if events and events[-1][0] == pb.STEP_EVENT_KIND_ENDED:
            break
    before = (pb.STEP_EVENT_KIND_CALLERS_TURN, pb.STEP_EVENT_KIND_TOKENIZING)  # if they took a millisecond
    kinds = [kind for kind, _ in events if kind not in before]
    assert kinds == [pb.STEP_EVENT_KIND_QUEUED, pb.STEP_EVENT_KIND_ADMITTED, pb.STEP_EVENT_KIND_ENDED]
    assert events[-1][1] == len(completion.token_ids)


async def test_the_tokenizer_comes_in_pieces_below_the_default_limit(channel: grpc.aio.Channel) -> None:
    pieces = [piece async for piece in SchedulerServiceStub(channel).GetTokenizer(pb.GetTokenizerRequest())]
    assert all(piece.ByteSize() < 4 << 20 for piece in pieces)
    assert "model" in json.loads(b"".join(piece.tokenizer_json for piece in pieces))
    assert pieces[0].eos_token_ids


async def test_the_stop_string_is_in_the_text_if_asked_for(stack: Stack) -> None:
    client = stack.client()
    free = (await client.completions("x", max_tokens=40, seed=3, ignore_eos=True))[0]
    stop = next(c for c in free.text[5:] if c.isascii() and c.isprintable())
    without = (await client.completions("x", max_tokens=40, seed=3, ignore_eos=True, stop=[stop]))[0]
    having = (
        await client.completions(
            "x", max_tokens=40, seed=3, ignore_eos=True, stop=[stop], include_stop_string=True
        )
    )[0]
    assert having.text == without.text + stop
    assert free.text.startswith(having.text)


async def test_only_what_was_asked_for_is_returned(stack: Stack) -> None:
    client = stack.client()
    both = (await client.completions("x", max_tokens=9, seed=3, ignore_eos=True))[0]
    text = (await client.completions("x", max_tokens=9, seed=3, ignore_eos=True, returns="text"))[0]
    ids = (await client.completions("x", max_tokens=9, seed=3, ignore_eos=True, returns="token_ids"))[0]
    assert (text.text, text.token_ids) == (both.text, ())
    assert (ids.text, ids.token_ids) == ("", both.token_ids)


async def test_nothing_is_sent_before_the_first_message(stack: Stack) -> None:
    """So that a client's own retryPolicy, which ends with the initial metadata, works until then."""
    async with grpc.aio.insecure_channel(stack.client().addresses[0]) as channel:
        call = SchedulerServiceStub(channel).Generate(
            pb.GenerateRequest(text="x", stop=pb.StopConditions(max_tokens=3, ignore_eos=True))
        )
        metadata = dict(await call.initial_metadata())
        first: Any = await call.read()
        assert first.HasField("started")
        assert metadata["request-id"] == first.started.request_id
        call.cancel()


async def test_deltas_tell_when_their_tokens_came(stack: Stack) -> None:
    client = stack.client()
    times = [
        event.elapsed_us
        async for event in client.generate("x", max_tokens=5, ignore_eos=True)
        if hasattr(event, "elapsed_us")
    ]
    assert times == sorted(times)
    assert times[0] > 0


async def test_operators_see_the_executors_and_end_any_request(
    stack: Stack, channel: grpc.aio.Channel
) -> None:
    admin = admin_pb2_grpc.AdminServiceStub(channel)
    listed = (await admin.ListExecutors(admin_pb2.ListExecutorsRequest())).executors
    assert [(one.connected, one.active, one.draining) for one in listed] == [(True, True, False)]
    generation = stack.client().generate("x", max_tokens=20_000, ignore_eos=True, request_id="long")
    await anext(generation)
    ended = await admin.AbortRequests(admin_pb2.AbortRequestsRequest(request_ids=["long", "none"]))
    assert (list(ended.aborted), list(ended.unknown)) == (["long"], ["none"])
    with pytest.raises(errors.Cancelled) as caught:
        async for _ in generation:
            pass
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.ABORTED, "ABORTED")


async def test_status_has_the_figures_that_a_router_needs(stack: Stack) -> None:
    client = stack.client()
    await client.completions("a prompt", max_tokens=4)
    status = await client.status()
    assert (status.state, status.ready_executors) == ("serving", 1)
    assert status.page_size > 0
    assert 0 < status.available_pages <= status.total_pages
    assert status.seats > 0
    assert status.uncomputed_tokens == 0
