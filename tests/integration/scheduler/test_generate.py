"""The public API end to end: a scheduler and an oracle executor as processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from paceline import aio, errors, types
from paceline.chat import Message
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

from tests.support.checkout import ROOT
from tests.support.stack import Stack, eventually, ids_of, oracle_stack

PROMPT = "Once upon a time"
MASK = (1 << 64) - 1


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    with oracle_stack(directory, executor=["--step-ms", "1"], scheduler=["--log-level", "debug"]) as stack:
        yield stack
        assert "Traceback" not in stack.scheduler.log


@pytest.fixture
async def client(stack: Stack) -> aio.Client:
    return stack.client()


@pytest.fixture(autouse=True)
async def nothing_leaks(stack: Stack) -> object:
    yield
    for address in stack.addresses:
        await stack.all_pages_back(address)


async def long_generation(client: aio.Client, request_id: str = "") -> aio.Generation:
    """One that runs until it is ended, and has begun."""
    generation = client.generate(PROMPT, max_tokens=20_000, ignore_eos=True, request_id=request_id)
    await anext(generation)
    return generation


async def test_a_stream_brings_all_tokens_in_order_then_one_end(client: aio.Client) -> None:
    events = [event async for event in client.generate(PROMPT, max_tokens=20, seed=1, ignore_eos=True)]
    *deltas, end = events
    assert isinstance(end, types.Finished)
    assert all(isinstance(delta, types.Delta) for delta in deltas)
    ids = [id_ for delta in deltas if isinstance(delta, types.Delta) for id_ in delta.token_ids]
    text = "".join(delta.text for delta in deltas if isinstance(delta, types.Delta))
    assert len(ids) == end.usage.completion_tokens == 20
    assert end.reason is types.FinishReason.LENGTH
    assert text == await client.detokenize(ids)


async def test_the_initial_metadata_names_the_request(client: aio.Client) -> None:
    generation = client.generate(PROMPT, max_tokens=1, request_id="my-id")
    assert await generation.request_id() == "my-id"
    await generation.collect()


async def test_unary_and_stream_and_batch_agree_token_by_token(client: aio.Client) -> None:
    (unary,) = await client.completions(PROMPT, max_tokens=30, seed=7, temperature=0.8, ignore_eos=True)
    batch = [
        client.generate(PROMPT, max_tokens=30, seed=seed, temperature=0.8, ignore_eos=True).collect()
        for seed in range(16)
    ]
    streamed = [ids_of(completions[0]) for completions in await asyncio.gather(*batch)]
    assert streamed[7] == ids_of(unary)
    assert len({tuple(ids) for ids in streamed}) == 16


async def test_each_completion_of_n_is_a_request_under_its_own_seed(client: aio.Client) -> None:
    def mix64(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    seeds = [5, *(mix64(5 ^ mix64((0x9E3779B97F4A7C15 * index) & MASK)) for index in (1, 2))]
    together = await client.completions(PROMPT, n=3, seed=5, max_tokens=12, ignore_eos=True)
    alone = [await client.completions(PROMPT, seed=seed, max_tokens=12, ignore_eos=True) for seed in seeds]
    assert [ids_of(one) for one in together] == [ids_of(one) for (one,) in alone]


async def test_a_stop_string_ends_the_text_before_it(client: aio.Client) -> None:
    (whole,) = await client.completions(PROMPT, seed=3, max_tokens=60, ignore_eos=True)
    stop = whole.text[20:23]
    (stopped,) = await client.completions(
        PROMPT, seed=3, max_tokens=60, ignore_eos=True, stop=[stop, "\0\0\0\0"]
    )
    assert stopped.text == whole.text[: whole.text.find(stop)]
    assert stopped.finished is not None
    assert stopped.finished.stop_string == stop
    assert list(whole.token_ids)[: len(stopped.token_ids)] == list(stopped.token_ids)


async def test_messages_go_through_the_template_and_token_ids_go_as_they_are(client: aio.Client) -> None:
    messages = [Message("user", "hello")]
    ids = await client.tokenize(messages=messages)
    (templated,) = await client.completions(messages=messages, seed=1, max_tokens=8, ignore_eos=True)
    (direct,) = await client.completions(token_ids=ids, seed=1, max_tokens=8, ignore_eos=True)
    assert ids_of(templated) == ids_of(direct)


async def test_logprobs_come_one_per_token(client: aio.Client) -> None:
    (completion,) = await client.completions(PROMPT, max_tokens=5, temperature=0, logprobs=2, ignore_eos=True)
    assert [len(one.top) for one in completion.logprobs] == [2] * 5
    for id_, one in zip(completion.token_ids, completion.logprobs, strict=True):
        assert one.top[0][0] == id_  # greedy: the chosen one is the best
        assert one.top[0][1] == pytest.approx(one.logprob)


async def test_leaving_a_stream_frees_its_pages(client: aio.Client, stack: Stack) -> None:
    before = (await client.status()).cancelled
    (await long_generation(client)).close()

    async def gone() -> bool:
        status = await client.status()
        return status.running == 0 and status.cancelled == before + 1

    await eventually(gone, "the request goes on without its client")


async def _read_all(call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def _kill_clients(address: str, times: int) -> None:
    code = (
        "import sys\n"
        "from paceline import Client\n"
        "with Client(sys.argv[1]) as client:\n"
        "    for event in client.generate('x', max_tokens=20000, ignore_eos=True):\n"
        "        print(event, flush=True)\n"
    )
    for _ in range(times):
        process = subprocess.Popen(
            [sys.executable, "-c", code, address],
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": str(ROOT / "clients" / "python")},
        )
        assert process.stdout is not None
        try:
            assert process.stdout.readline()
        finally:
            process.kill()
            process.stdout.close()
            process.wait()


async def _killed_clients(stack: Stack, times: int) -> None:
    await asyncio.to_thread(_kill_clients, stack.scheduler.address, times)
    async with stack.client() as client:

        async def gone() -> bool:
            return (await client.status()).running == 0

        await eventually(gone, "a request goes on without its client")
    await stack.all_pages_back(stack.addresses[0])


async def test_a_killed_clients_request_ends(stack: Stack) -> None:
    await _killed_clients(stack, 3)


@pytest.mark.slow
async def test_the_requests_of_200_killed_clients_end(stack: Stack) -> None:
    await _killed_clients(stack, 200)


async def test_the_clients_deadline_ends_the_request(client: aio.Client) -> None:
    with pytest.raises(errors.DeadlineExceeded):
        await client.generate(PROMPT, max_tokens=20_000, ignore_eos=True, timeout_s=0.3).collect()
    with pytest.raises(errors.DeadlineExceeded):
        await client.completions(PROMPT, max_tokens=20_000, ignore_eos=True, timeout_s=0.3)


async def test_a_request_id_can_be_used_again_once_its_request_has_ended(client: aio.Client) -> None:
    generation = await long_generation(client, "twice")
    with pytest.raises(errors.DuplicateRequest):
        await client.completions(PROMPT, max_tokens=1, request_id="twice")
    assert (await client.abort(["twice", "nobody"])) == types.Aborted(("twice",), ("nobody",))
    with pytest.raises(errors.Cancelled) as caught:
        await generation.collect()
    assert caught.value.reason == "ABORTED"
    await client.completions(PROMPT, max_tokens=1, request_id="twice")


BAD = [
    ("text", {"text": "x" * (10 << 20)}),
    ("text", {"text": ""}),
    ("token_ids[1]", {"token_ids": pb.TokenIds(ids=[1, 2**32 - 1])}),
    ("n", {"text": "x", "n": 10**6}),
    ("stop.max_tokens", {"text": "x", "stop": pb.StopConditions(max_tokens=0)}),
    ("stop.max_tokens", {"text": "x", "stop": pb.StopConditions(max_tokens=10**9)}),
    ("stop.max_tokens", {"text": "x", "stop": pb.StopConditions(max_tokens=32_768)}),
    ("sampling.temperature", {"text": "x", "sampling": pb.SamplingParams(temperature=float("nan"))}),
    ("stop.strings", {"text": "x", "stop": pb.StopConditions(strings=["y"] * 10_000)}),
    ("messages", {"messages": pb.Messages()}),
    ("prompt", {}),
]


async def test_bad_requests_are_refused_with_their_field_and_disturb_no_stream(
    client: aio.Client, stack: Stack
) -> None:
    (expected,) = await client.completions(PROMPT, seed=9, max_tokens=300, ignore_eos=True)
    canary = asyncio.create_task(client.generate(PROMPT, seed=9, max_tokens=300, ignore_eos=True).collect())
    async with grpc.aio.insecure_channel(stack.scheduler.address) as channel:
        stub = SchedulerServiceStub(channel)
        for field, fields in BAD:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _read_all(stub.Generate(pb.GenerateRequest(**fields)))  # type: ignore[arg-type]
            error = errors.from_rpc(caught.value)
            assert isinstance(error, errors.InvalidRequest)
            assert (error.metadata["field"], error.reason) == (field, "INVALID_REQUEST")
    assert ids_of((await canary)[0]) == ids_of(expected)


async def test_detokenize_refuses_unknown_ids(client: aio.Client) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"token_ids\[1\]"):
        await client.detokenize([1, 10**6])


async def test_a_stalled_reader_ends_its_stream_and_no_other(tmp_path: Path) -> None:
    with oracle_stack(tmp_path, scheduler=["--stall-timeout-s", "1"]) as stack:
        # Python's own client would take in megabytes unread; others' windows stay at 64 KiB.
        fixed_window = [("grpc.http2.bdp_probe", 0)]
        async with (
            grpc.aio.insecure_channel(stack.scheduler.address, fixed_window) as channel,
            stack.client() as client,
        ):
            call = SchedulerServiceStub(channel).Generate(
                pb.GenerateRequest(
                    text=PROMPT,
                    stop=pb.StopConditions(max_tokens=30_000, ignore_eos=True),
                    sampling=pb.SamplingParams(logprobs=20),
                )
            )
            await call.read()

            async def cut() -> bool:
                return (await client.status()).running == 0

            await eventually(cut, "the stream is not read, and has not ended", timeout_s=20)
            assert (await client.status()).finished == 0
            await client.completions(PROMPT, max_tokens=5)
            await stack.all_pages_back(stack.addresses[0])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _read_all(call)
        error = errors.from_rpc(caught.value)
        assert isinstance(error, errors.Cancelled)
        assert error.reason == "STALLED_READER"
