"""No answer of an executor ends the scheduler, and streams continue on another one with the right tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from google.protobuf.message import Message
from paceline import aio, errors
from paceline.executor.v1 import executor_pb2 as pb

from tests.support.altering_proxy import Alteration, AlteringProxy, altering_proxy, unaltered
from tests.support.stack import Stack, eventually, ids_of

pytestmark = pytest.mark.long

STREAMS, TOKENS = 3, 20
STEP = "StreamUnifiedDecode"
JUNK = b"\xff" * 20
HUGE = 2**32 - 1


@asynccontextmanager
async def two_executors(directory: Path) -> AsyncIterator[tuple[Stack, list[AlteringProxy]]]:
    """A scheduler in front of two executors that can be made to lie."""
    stack = Stack(directory)
    try:
        async with AsyncExitStack() as exits:
            executors = [stack.start_executor("--step-ms", "1") for _ in range(2)]
            proxies = [await exits.enter_async_context(altering_proxy(address)) for address in executors]
            addresses = [proxy.address for proxy in proxies]
            stack.start_scheduler("--heartbeat-interval-s", "0.1", executors=addresses)
            await asyncio.to_thread(stack.scheduler.wait_serving)
            yield stack, proxies
    finally:
        stack.kill()


async def tokens(client: aio.Client) -> list[list[int]]:
    runs = [
        client.generate(token_ids=[1 + seed, 2, 3], max_tokens=TOKENS, seed=seed, ignore_eos=True, logprobs=1)
        for seed in range(STREAMS)
    ]
    return [ids_of(completions[0]) for completions in await asyncio.gather(*(run.collect() for run in runs))]


async def both_connected(client: aio.Client) -> bool:
    return all(one.connected for one in await client.executors())


Lie = Callable[[pb.StreamUnifiedDecodeResponse], list[bytes]]


def said(change: Callable[[pb.StepResult], object]) -> Lie:
    def lie(reply: pb.StreamUnifiedDecodeResponse) -> list[bytes]:
        change(reply.result)
        return [reply.SerializeToString()]

    return lie


def last(values: object, value: int) -> Callable[[pb.StepResult], object]:
    return lambda result: getattr(result.rows, str(values)).__setitem__(-1, value)


LIES: dict[str, Lie] = {
    "bytes that are no message": lambda reply: [JUNK],
    "an empty message": lambda reply: [b""],
    "half of the message": lambda reply: [reply.SerializeToString()[:-3]],
    "an error": lambda reply: [pb.StreamUnifiedDecodeResponse(error=pb.Error(code=13)).SerializeToString()],
    "a very long error": lambda reply: [
        pb.StreamUnifiedDecodeResponse(error=pb.Error(code=9, message="é" * 200_000)).SerializeToString()
    ],
    "the answer twice": lambda reply: [reply.SerializeToString()] * 2,
    "the answer without end": lambda reply: [reply.SerializeToString()] * 5_000,
    "another step": said(lambda result: setattr(result, "step_id", result.step_id + 1)),
    "another process": said(lambda result: setattr(result, "epoch", 7)),
    "no rows": said(lambda result: result.ClearField("rows")),
    "a row too many": said(lambda result: result.rows.kv_lengths.append(1)),
    "an op too many": said(lambda result: result.ops.add()),
    "a token that no row sampled": said(lambda result: result.rows.tokens.append(1)),
    "a token outside of the vocabulary": said(last("tokens", HUGE)),
    "a KV length beyond the context": said(last("kv_lengths", HUGE)),
    "a KV length of nothing": said(last("kv_lengths", 0)),
    "a number of tokens that is huge": said(last("token_counts", HUGE)),
    "an error of a row that was not sent": said(lambda result: result.rows.errors.add(index=HUGE, code=5)),
    "an error that is none": said(lambda result: result.rows.errors.add(index=0)),
    "a detail of a row that was not sent": said(lambda result: result.rows.details.add(row=HUGE)),
    "a logprob that is no number": said(
        lambda result: result.rows.details[0].logprobs.__setitem__(0, float("nan"))
    ),
    "pages that it does not have": said(lambda result: setattr(result, "free_pages", HUGE)),
}


def once(lie: Lie, told: asyncio.Event) -> Alteration:
    """Lies in the answer to one step that sampled, and tells the truth afterwards."""

    def alteration(rpc: str, reply: bytes) -> list[bytes]:
        message = pb.StreamUnifiedDecodeResponse()
        if rpc != STEP or told.is_set():
            return [reply]
        message.ParseFromString(reply)
        if not message.result.rows.tokens or not message.result.rows.details:
            return [reply]
        told.set()
        return lie(message)

    return alteration


async def test_a_false_answer_loses_the_executor_and_streams_go_on_with_the_same_tokens(
    tmp_path: Path,
) -> None:
    async with two_executors(tmp_path) as (stack, proxies), stack.client() as client:
        expected = await tokens(client)
        for what, lie in LIES.items():
            await eventually(lambda: both_connected(client), f"not taken back before {what}")
            before, told = sum(one.losses for one in await client.executors()), asyncio.Event()
            for proxy in proxies:
                proxy.alteration = once(lie, told)
            assert await tokens(client) == expected, what
            assert told.is_set()
            after = sum(one.losses for one in await client.executors())
            assert after > before, f"{what} was believed"
            assert stack.scheduler.running, what


def maxed(reply: Message) -> None:
    """Make all numbers as large as they can be."""
    for field in reply.DESCRIPTOR.fields:
        if field.is_repeated or field.name == "epoch":
            continue
        if field.message_type is not None and reply.HasField(field.name):
            maxed(getattr(reply, field.name))
        elif field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64):
            setattr(reply, field.name, HUGE if field.cpp_type == field.CPPTYPE_UINT32 else 2**64 - 1)
        elif field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
            setattr(reply, field.name, float("nan"))


def exaggerated(rpc: str, reply: bytes) -> bytes:
    message: Message = getattr(pb, f"{rpc}Response").FromString(reply)
    maxed(message)
    return message.SerializeToString()


HANDSHAKE = ["GetStatus", "GetInfo", "OpenSession"]
ANSWERS: list[Callable[[str, bytes], bytes]] = [
    lambda rpc, reply: JUNK,
    lambda rpc, reply: b"",
    lambda rpc, reply: reply[:-3],
    exaggerated,
]


class FalseHandshake:
    """Fails the first heartbeat, and then answers one RPC of each handshake falsely."""

    def __init__(self, rpc: str, answer: Callable[[str, bytes], bytes]) -> None:
        self.asked = asyncio.Event()
        self._rpc, self._answer = rpc, answer
        self._lost = False

    def __call__(self, rpc: str, reply: bytes) -> list[bytes]:
        if rpc == "GetStatus" and not self._lost:
            self._lost = True
            return [JUNK]
        if rpc != self._rpc:
            return [reply]
        self.asked.set()
        return [self._answer(rpc, reply)]


async def test_false_handshakes_and_heartbeats_do_not_affect_the_other_executor(tmp_path: Path) -> None:
    async with two_executors(tmp_path) as (stack, (liar, _)), stack.client() as client:
        expected = await tokens(client)
        for rpc in HANDSHAKE:
            for answer in ANSWERS:
                liar.alteration = handshake = FalseHandshake(rpc, answer)
                await asyncio.wait_for(handshake.asked.wait(), 30)
                assert await tokens(client) == expected
                assert stack.scheduler.running, stack.scheduler.log
                await client.model_info()
                liar.alteration = unaltered
                await eventually(lambda: both_connected(client), f"not taken back after {rpc}")


def mutated(rng: random.Random) -> Alteration:
    """Every third reply of a step is damaged."""

    def alteration(rpc: str, reply: bytes) -> list[bytes]:
        if rpc != STEP or not reply or rng.random() > 0.3:
            return [reply]
        damaged = bytearray(reply)
        for _ in range(rng.choice([1, 1, 3, 20])):
            at = rng.randrange(len(damaged))
            match rng.randrange(4):
                case 0:
                    damaged[at] = rng.randrange(256)
                case 1:
                    damaged[at] ^= 1 << rng.randrange(8)
                case 2:
                    del damaged[at:]
                case 3:
                    damaged[at:at] = rng.randbytes(rng.randrange(1, 9))
            if not damaged:
                break
        return [bytes(damaged)] * rng.choice([1, 1, 1, 2])

    return alteration


async def test_damaged_answers_end_no_scheduler_and_leave_nothing_behind(tmp_path: Path) -> None:
    """A token may come out wrong, as one that is damaged into another can't be told; nothing else may."""
    async with two_executors(tmp_path) as (stack, proxies), stack.client() as client:
        expected, rng = await tokens(client), random.Random(1)
        for proxy in proxies:
            proxy.alteration = mutated(rng)
        for _ in range(4):
            try:
                await asyncio.wait_for(tokens(client), 60)
            except (errors.InternalError, errors.Unavailable, errors.StreamLost, errors.StaleState):
                continue
        assert stack.scheduler.running, stack.scheduler.log
        for proxy in proxies:
            proxy.alteration = unaltered
        await eventually(lambda: both_connected(client), "not taken back")
        assert await tokens(client) == expected
        for address in stack.addresses:
            await stack.all_pages_back(address)
