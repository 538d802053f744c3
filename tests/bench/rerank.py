"""What a shared prefix saves in one call, and what evaluations cost the generations beside them.

usage: python -m tests.bench.rerank ADDRESS [--pairs 5] [--part prefix|beside]

ADDRESS is a running scheduler (`paceline serve`). Prints a JSON line for each part.

prefix: a query of 512 tokens with 100 documents of 64, random ids, as one Score call. Beside it the same
inputs in 100 calls at once, each with a cache_salt of its own, so that nothing is shared.
beside: 8 generations of 128 tokens, while prompts of 256 tokens arrive at a steady rate: as Score, as Embed,
and as Generate with one token. The p99 of the time between two deltas, and its ratio to Generate's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import grpc.aio
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc

QUERY, DOCUMENTS, DOCUMENT = 512, 100, 64
STREAMS, NEW, PROMPT = 8, 128, 256
Stub: TypeAlias = "rpc.SchedulerServiceAsyncStub"


class Random:
    """Random token ids, none of them special."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._rng, self._size = random.Random(seed), vocab_size

    def ids(self, count: int) -> pb.TokenIds:
        """So many of them."""
        return pb.TokenIds(ids=[self._rng.randrange(100, self._size) for _ in range(count)])


async def prefix(stub: Stub, draw: Random, pairs: int, documents: int) -> dict[str, object]:
    """Seconds of one call, and of as many calls as there are documents."""
    together, apart, cached = [], [], []
    for pair in range(pairs):
        query = draw.ids(QUERY)
        inputs = [
            pb.ScoreInput(prompt_token_ids=query, token_ids=draw.ids(DOCUMENT)) for _ in range(documents)
        ]
        began = time.perf_counter()
        reply = await stub.Score(pb.ScoreRequest(inputs=inputs, cache_salt=f"together {pair}"))
        together.append(time.perf_counter() - began)
        cached.append(reply.usage.cached_tokens / reply.usage.prompt_tokens)
        began = time.perf_counter()
        alone = [
            stub.Score(pb.ScoreRequest(inputs=[one], cache_salt=f"{pair} {number}"))
            for number, one in enumerate(inputs)
        ]
        others = [(await call).scores[0].logprob for call in alone]
        apart.append(time.perf_counter() - began)
        worst = max(abs(a.logprob - b) for a, b in zip(reply.scores, others, strict=True))
    return {
        "part": "prefix",
        "documents": documents,
        "one_call_s": spread(together),
        "without_sharing_s": spread(apart),
        "times_faster": spread([b / a for a, b in zip(together, apart, strict=True)]),
        "cached_share": spread(cached),
        "largest_difference_of_a_sum": worst,
    }


async def gaps_s(stub: Stub, prompt: pb.TokenIds) -> list[float]:
    """Between the deltas of one generation."""
    stop = pb.StopConditions(max_tokens=NEW, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=prompt, stop=stop, sampling=pb.SamplingParams(temperature=0.0))
    at, found = 0.0, []
    async for message in stub.Generate(request):
        if message.HasField("delta"):
            now = time.perf_counter()
            if at:
                found.append(now - at)
            at = now
    return found


async def beside(stub: Stub, draw: Random, pairs: int, per_s: float) -> dict[str, object]:
    """The p99 of gaps beside each kind of call; 0 where nothing arrives."""

    async def generate(ids: pb.TokenIds) -> None:
        one = pb.GenerateRequest(token_ids=ids, stop=pb.StopConditions(max_tokens=1, ignore_eos=True))
        await stub.GenerateUnary(pb.GenerateUnaryRequest(request=one))

    async def score(ids: pb.TokenIds) -> None:
        await stub.Score(pb.ScoreRequest(inputs=[pb.ScoreInput(token_ids=ids)]))

    async def embed(ids: pb.TokenIds) -> None:
        await stub.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=ids)]))

    kinds: dict[str, Callable[[pb.TokenIds], Awaitable[None]]] = {
        "generate": generate,
        "score": score,
        "embed": embed,
    }
    p99: dict[str, list[float]] = {name: [] for name in kinds}
    median: dict[str, list[float]] = {name: [] for name in kinds}
    for pair in range(pairs):
        for name in list(kinds)[pair % 3 :] + list(kinds)[: pair % 3]:
            found = await _beside(stub, draw, kinds[name], per_s)
            p99[name].append(found[int(0.99 * len(found))])
            median[name].append(statistics.median(found))
    return {
        "part": "beside",
        "p99_ms": {name: spread([1000 * value for value in values]) for name, values in p99.items()},
        "median_ms": {name: spread([1000 * value for value in values]) for name, values in median.items()},
        "p99_to_generate": {
            name: spread([a / b for a, b in zip(p99[name], p99["generate"], strict=True)])
            for name in ("score", "embed")
        },
    }


async def _beside(
    stub: Stub, draw: Random, call: Callable[[pb.TokenIds], Awaitable[None]], per_s: float
) -> list[float]:
    streams = asyncio.gather(*(gaps_s(stub, draw.ids(32)) for _ in range(STREAMS)))
    calls: list[asyncio.Future[None]] = []
    while not streams.done():
        calls.append(asyncio.ensure_future(call(draw.ids(PROMPT))))
        await asyncio.sleep(1 / per_s)
    for late in calls:
        late.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    return sorted(gap for gaps in await streams for gap in gaps)


def spread(values: list[float]) -> list[float]:
    """Least, median, most."""
    return [round(value, 4) for value in (min(values), statistics.median(values), max(values))]


async def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--part", choices=["prefix", "beside", "both"], default="both")
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--per-s", type=float, default=1.0, help="prompts that arrive beside generations")
    args = parser.parse_args()
    async with grpc.aio.insecure_channel(args.address) as channel:
        stub = rpc.SchedulerServiceStub(channel)
        draw = Random((await stub.GetModelInfo(pb.GetModelInfoRequest())).vocab_size, seed=1)
        await gaps_s(stub, draw.ids(32))  # warm
        if args.part != "beside":
            print(json.dumps(await prefix(stub, draw, args.pairs, args.documents)), flush=True)
        if args.part != "prefix":
            print(json.dumps(await beside(stub, draw, args.pairs, args.per_s)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
