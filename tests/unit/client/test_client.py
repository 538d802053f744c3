import asyncio
import inspect

import paceline
import pytest
from paceline import aio, errors
from paceline.types import Completion, Delta, Finished, FinishReason

from tests.unit.client.conftest import Served

TWINS = [
    (paceline.Client, aio.Client),
    (paceline.Generation, aio.Generation),
    (paceline.ExecutorClient, aio.ExecutorClient),
    (paceline.StepStream, aio.StepStream),
]


async def test_a_stream_gives_typed_events_in_order(served: Served) -> None:
    events = [event async for event in served.client.generate("words", logprobs=1)]
    assert [event.text for event in events if isinstance(event, Delta)] == ["a ", "b ", "c"]
    assert isinstance(events[0], Delta)
    assert events[0].logprobs[0].top == ((4, -0.5),)
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.stop_string, end.eos_token_id) == (FinishReason.STOP, "END", None)
    assert (end.usage.prompt_tokens, end.usage.first_token_ms) == (5, 7)
    assert (end.usage.drafted_tokens, end.usage.accepted_tokens, end.usage.verifications) == (5, 3, 2)
    assert end.usage.acceptance_by_position == (1.0, 0.5, 0.0)


async def test_collect_joins_the_deltas_of_each_index(served: Served) -> None:
    completions = await served.client.generate("words", n=2).collect()
    assert [(one.index, one.text, one.token_ids) for one in completions] == [
        (0, "a b c", (0, 1, 2)),
        (1, "a b c", (0, 1, 2)),
    ]
    assert all(one.finished for one in completions)


async def test_every_call_of_a_client_with_a_model_names_it_unless_it_names_another(served: Served) -> None:
    async with aio.Client(served.address, model="mine") as client:
        await client.complete("words")
        await client.chat("words")
        await client.generate("words").text()
        await client.complete("words", model="other")
    assert [request.model for request in served.fake.requests] == ["mine", "mine", "mine", "other"]


async def test_text_is_the_first_completion(served: Served) -> None:
    assert await served.client.generate("words").text() == "a b c"


async def test_the_request_id_comes_back(served: Served) -> None:
    async with served.client.generate("forever", request_id="mine") as generation:
        assert await generation.request_id() == "mine"


async def test_leaving_the_block_cancels_the_request(served: Served) -> None:
    async with served.client.generate("forever") as generation:
        async for _ in generation:
            break
    await asyncio.wait_for(served.fake.cancelled.wait(), 60)


async def test_letting_go_of_the_iterator_cancels_the_request(served: Served) -> None:
    async for _ in served.client.generate("forever"):
        break
    await asyncio.wait_for(served.fake.cancelled.wait(), 60)


async def test_closing_ends_the_iteration_without_an_error(served: Served) -> None:
    generation = served.client.generate("forever")
    seen = 0
    async for _ in generation:
        seen += 1
        if seen == 3:
            generation.close()
    assert seen == 3


async def test_a_closed_client_says_so(served: Served) -> None:
    client = aio.Client(served.address)
    await client.close()
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.generate("x")
    for call in (client.model_info(), client.chat("x")):
        with pytest.raises(RuntimeError, match="the client is closed"):
            await call
    blocking = paceline.Client(served.address)
    blocking.close()
    with pytest.raises(RuntimeError, match="the client is closed"):
        blocking.status()


async def test_another_task_can_close_a_stream_that_waits(served: Served) -> None:
    generation = served.client.generate("forever")
    reader = asyncio.create_task(generation.collect())
    await generation.request_id()
    generation.close()
    assert isinstance(await asyncio.wait_for(reader, 5), list)


async def test_cancelling_the_reading_task_cancels_the_request(served: Served) -> None:
    reader = asyncio.create_task(served.client.generate("forever").collect())
    await served.fake.arrived.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await asyncio.wait_for(served.fake.cancelled.wait(), 60)


async def test_a_refusal_says_when_to_come_back(served: Served) -> None:
    with pytest.raises(errors.QueueFull, match="the queue is full") as caught:
        await served.client.generate("full").collect()
    assert (caught.value.reason, caught.value.retry_after_s) == ("QUEUE_FULL", 1.5)
    assert caught.value.metadata == {"field": "max_tokens"}


async def test_an_error_in_midstream_is_raised_after_what_came_before(served: Served) -> None:
    generation = served.client.generate("midway")
    assert isinstance(await anext(generation), Delta)
    with pytest.raises(errors.InternalError, match="the device failed"):
        await anext(generation)


async def test_a_deadline_is_an_error_of_its_own(served: Served) -> None:
    with pytest.raises(errors.DeadlineExceeded, match=r"Generate did not end within its timeout_s of 0.05 s"):
        await served.client.generate("forever", timeout_s=0.05).collect()


async def test_an_oversized_prompt_is_an_invalid_request(served: Served) -> None:
    with pytest.raises(errors.InvalidRequest, match="too large"):
        await served.client.generate("x" * (5 << 20)).collect()
    assert not served.fake.requests


async def test_nobody_there_is_unavailable() -> None:
    async with aio.Client("127.0.0.1:1") as client:
        with pytest.raises(errors.Unavailable):
            await client.status(timeout_s=5)


async def test_the_token_goes_with_every_call(served: Served) -> None:
    async with aio.Client(served.address, security=paceline.Security(token="secret")) as client:
        await client.generate("words").collect()
    assert served.fake.metadata["authorization"] == "Bearer secret"


async def test_unary_calls_give_plain_values(served: Served) -> None:
    client = served.client
    assert await client.tokenize("hé") == list("hé".encode())
    assert await client.detokenize([104, 105]) == "hi"
    assert (await client.abort(["a", "b"])).unknown == ("b",)
    assert (await client.model_info()).limits.max_n == 4
    assert (await client.executors())[0].address == "here"
    completion = await client.complete("words")
    assert isinstance(completion, Completion)
    assert await client.completions("words") == [completion]
    assert (await client.chat([{"role": "user", "content": "hi"}])).text == "a b c"
    assert (await client.chat("hi")).text == "a b c"


async def test_several_completions_are_asked_of_completions_alone(served: Served) -> None:
    with pytest.raises(errors.InvalidRequest, match="`completions` returns 2"):
        await served.client.complete("words", n=2)
    with pytest.raises(errors.InvalidRequest, match="`completions` returns 2"):
        await served.client.chat("words", n=2)


async def test_cancel_ends_the_request_and_the_iteration(served: Served) -> None:
    generation = served.client.generate("forever")
    async for _ in generation:
        generation.cancel()
    await asyncio.wait_for(served.fake.cancelled.wait(), 60)


async def test_the_blocking_client_does_the_same(served: Served) -> None:
    def use() -> str:
        with paceline.Client(served.address) as client:
            assert client.status().running == 2
            with pytest.raises(errors.QueueFull):
                client.generate("full").collect()
            generation = client.generate("forever", request_id="r")
            assert generation.request_id() == "r"
            for _ in generation:
                generation.close()
            for _ in client.generate("forever"):
                break
            return client.generate("words").text()

    assert await asyncio.to_thread(use) == "a b c"
    await asyncio.wait_for(served.fake.cancelled.wait(), 60)


async def test_a_view_calls_over_the_same_channels_with_another_token(served: Served) -> None:
    view = served.client.view("secret", {"traceparent": "00-1"})
    await view.vocabulary()
    sent = served.fake.metadata
    assert (sent["authorization"], sent["traceparent"]) == ("Bearer secret", "00-1")
    await served.client.vocabulary()
    assert "authorization" not in served.fake.metadata
    with pytest.raises(ValueError, match="token"):
        served.client.view("two words")


def as_blocking(address: str) -> tuple[bytes, ...]:
    with paceline.Client(address) as client:
        return client.view("token").vocabulary()


async def test_a_vocabulary_is_joined_of_its_parts_and_begins_anew_when_it_changes(served: Served) -> None:
    plain = tuple(b"v" + bytes([token]) for token in range(256))
    assert await served.client.vocabulary() == plain
    assert await asyncio.to_thread(as_blocking, served.address) == plain
    served.fake.vocabularies = [b"o", b"o"]
    assert await served.client.vocabulary() == plain


@pytest.mark.parametrize(("blocking", "asynchronous"), TWINS, ids=lambda kind: kind.__module__)
def test_the_two_clients_offer_the_same_calls(blocking: type, asynchronous: type) -> None:
    def calls(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(value).parameters)
            for name, value in vars(kind).items()
            if callable(value) and not name.startswith("_")
        }

    assert calls(blocking) == calls(asynchronous)
