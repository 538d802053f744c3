"""N concurrent Generate streams against a running scheduler, timed token by token."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

import grpc.aio
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc


@dataclass
class Stream:
    """Arrival time of each token of one stream, in seconds of the monotonic clock."""

    started: float
    arrivals: list[float] = field(default_factory=list)


def random_prompt(rng: random.Random, tokens: int, vocab_size: int) -> list[int]:
    """Random token ids: no prefix is shared, no answer is short."""
    return [rng.randrange(vocab_size) for _ in range(tokens)]


async def run_stream(
    stub: rpc.SchedulerServiceAsyncStub, prompt: list[int], new: int, sampling: pb.SamplingParams
) -> Stream:
    """One request of exactly `new` tokens, decoded plainly."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        sampling=sampling,
        stop=pb.StopConditions(max_tokens=new, ignore_eos=True),
        speculation=pb.Speculation(mode=pb.SPECULATION_MODE_OFF),
    )
    stream = Stream(time.monotonic())
    async for event in stub.Generate(request):
        now = time.monotonic()
        stream.arrivals += [now] * len(event.delta.token_ids)
    if len(stream.arrivals) != new:
        raise RuntimeError(f"asked for {new} tokens, got {len(stream.arrivals)}")
    return stream


async def run_streams(
    address: str, streams: int, prompt: int, new: int, sampling: pb.SamplingParams, seed: int = 0
) -> list[Stream]:
    """All at once, each with a prompt of its own."""
    rng = random.Random(seed)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.SchedulerServiceStub(channel)
        vocab_size = (await stub.GetModelInfo(pb.GetModelInfoRequest())).vocab_size
        prompts = [random_prompt(rng, prompt, vocab_size) for _ in range(streams)]
        jobs = [run_stream(stub, ids, new, sampling) for ids in prompts]
        return list(await asyncio.gather(*jobs))


def decode_tok_s(streams: list[Stream]) -> float:
    """Tokens per second between the last stream's first token and the first stream's end."""
    begin = max(s.arrivals[0] for s in streams)
    end = min(s.arrivals[-1] for s in streams)
    return sum(1 for s in streams for t in s.arrivals if begin < t <= end) / (end - begin)


def first_token_ms(streams: list[Stream]) -> float:
    """Median time to the first token."""
    waits = sorted(s.arrivals[0] - s.started for s in streams)
    return waits[len(waits) // 2] * 1e3
