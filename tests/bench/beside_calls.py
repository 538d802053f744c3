"""How much another identity's long call slows a stream: a prefill, a Score, an Embed, a Rerank.

usage: python -m tests.bench.beside_calls ADDRESS [--than ADDRESS] [--tokens A,B] [--runs 10] [--new 96]

ADDRESS is a running scheduler (`paceline serve`), with a tokens file in which A and B are the tokens of two
identities; without --tokens the stream and the call are of one identity. Prints a JSON line a load: the
stream alone and beside the call, in alternating order, and the call beside the stream and alone. With --than
the same runs go in turn to another scheduler with the same executor, as one with an earlier version, or with
--step-budget-ms 100000, which bounds no step; the ratios of the calls' times are of pairs.

The stream decodes greedily, a token a step. A gap is the time between two of its deltas while the call runs,
and the rate is their number divided by that time. The call begins when the stream has a dozen tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.channel import Link, Security, open_aio_channel
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

if TYPE_CHECKING:
    from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

LONG, INPUTS, INPUT, DOCUMENTS = 4000, 4, 1024, 50
WORDS = (
    "the a of model river stone light paper answer window green seven often under and".split()  # noqa: SIM905
)
STARTED = 12
"""Tokens of the stream before the call begins."""


class Caller:
    """One identity's connection to a scheduler."""

    def __init__(self, address: str, token: str) -> None:
        security = Security(token=token)
        self.stub: SchedulerServiceAsyncStub = SchedulerServiceStub(
            open_aio_channel(address, Link.PUBLIC, security)
        )
        self.metadata = security.metadata


@dataclass(frozen=True)
class Callers:
    """Two identities at one scheduler."""

    stream: Caller
    call: Caller


@dataclass
class Run:
    """One stream, perhaps beside a call."""

    longest_gap_ms: float
    tokens_per_s: float
    call_s: float = 0.0


Load = Callable[[Caller, random.Random], Awaitable[object]]


def _ids(rng: random.Random, count: int) -> pb.TokenIds:
    return pb.TokenIds(ids=[rng.randrange(100, 40_000) for _ in range(count)])


async def _prefill(caller: Caller, rng: random.Random) -> None:
    stop = pb.StopConditions(max_tokens=1, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=_ids(rng, LONG), stop=stop)
    await caller.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request), metadata=caller.metadata)


async def _score(caller: Caller, rng: random.Random) -> None:
    await caller.stub.Score(
        pb.ScoreRequest(inputs=[pb.ScoreInput(token_ids=_ids(rng, LONG))], top_logprobs=5),
        metadata=caller.metadata,
    )


async def _embed(caller: Caller, rng: random.Random) -> None:
    inputs = [pb.EmbedInput(token_ids=_ids(rng, INPUT)) for _ in range(INPUTS)]
    await caller.stub.Embed(pb.EmbedRequest(inputs=inputs), metadata=caller.metadata)


async def _rerank(caller: Caller, rng: random.Random) -> None:
    documents = [" ".join(rng.choices(WORDS, k=48)) for _ in range(DOCUMENTS)]
    query = " ".join(rng.choices(WORDS, k=24))
    await caller.stub.Rerank(
        pb.RerankRequest(query=query, documents=documents, method=pb.RERANK_METHOD_LIKELIHOOD),
        metadata=caller.metadata,
    )


LOADS: dict[str, Load] = {
    "prefill of 4,000": _prefill,
    "Score of 4,000, top 5": _score,
    "Embed of 4 x 1,024": _embed,
    "Rerank of 50": _rerank,
}


async def measure(stubs: Callers, load: Load | None, rng: random.Random, new: int) -> Run:
    """A stream, alone for `new` tokens or for as long as the call runs."""
    ready, ended = asyncio.Event(), asyncio.Event()
    arrivals: list[float] = []

    async def stream() -> None:
        most = 4096 if load else STARTED + new
        request = pb.GenerateRequest(
            token_ids=_ids(rng, 32),
            sampling=pb.SamplingParams(temperature=0.0),
            stop=pb.StopConditions(max_tokens=most, ignore_eos=True),
            speculation=pb.Speculation(mode=pb.SPECULATION_MODE_OFF),
        )
        call = stubs.stream.stub.Generate(request, metadata=stubs.stream.metadata)
        async for event in call:
            if event.HasField("delta"):
                arrivals.append(time.perf_counter())
                if len(arrivals) == STARTED:
                    ready.set()
            if ended.is_set():
                call.cancel()
                return

    job = asyncio.create_task(stream())
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait((job, waiting), return_when=asyncio.FIRST_COMPLETED)
    if not ready.is_set():
        waiting.cancel()
        await job  # raises what ended the stream
    began = time.perf_counter()
    if load is None:
        await job
    else:
        await load(stubs.call, rng)
    end = time.perf_counter()
    ended.set()
    await asyncio.gather(job, return_exceptions=True)
    within = [at for at in arrivals if at <= end][STARTED - 1 :]
    gaps = [b - a for a, b in itertools.pairwise(within)] + [end - within[-1]]
    return Run(1e3 * max(gaps), (len(within) - 1) / (end - began), end - began)


async def alone_s(stubs: Callers, load: Load, rng: random.Random) -> float:
    """Seconds of the call while nobody streams."""
    began = time.perf_counter()
    await load(stubs.call, rng)
    return time.perf_counter() - began


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


async def compare(places: list[Callers], name: str, runs: int, new: int) -> dict[str, object]:
    """All runs of one load, at one scheduler or at two in turn."""
    load, rng = LOADS[name], random.Random(f"{name} {time.time_ns()}")
    alone: list[list[Run]] = [[] for _ in places]
    beside: list[list[Run]] = [[] for _ in places]
    calls: list[list[float]] = [[] for _ in places]
    for number in range(runs):
        order = list(enumerate(places))
        for at, stubs in order if number % 2 else reversed(order):
            alone[at].append(await measure(stubs, None, rng, new))
            beside[at].append(await measure(stubs, load, rng, new))
            calls[at].append(await alone_s(stubs, load, rng))
    result: dict[str, object] = {"load": name, "runs": runs}
    for at in range(len(places)):
        gap, rate = (
            _median([r.longest_gap_ms for r in beside[at]]),
            _median([r.tokens_per_s for r in beside[at]]),
        )
        own_gap, own = (
            _median([r.longest_gap_ms for r in alone[at]]),
            _median([r.tokens_per_s for r in alone[at]]),
        )
        result["here" if not at else "than"] = {
            "longest_gap_ms": gap,
            "alone_ms": own_gap,
            "times": round(gap / own_gap, 2),
            "tokens_per_s": rate,
            "alone_per_s": own,
            "part": round(rate / own, 2),
            "call_s": _median([r.call_s for r in beside[at]]),
            "call_alone_s": _median(calls[at]),
        }
    if len(places) > 1:
        both = zip(beside[0], beside[1], strict=True)
        result["call_times"] = _median([a.call_s / b.call_s for a, b in both])
        result["call_alone_times"] = _median([a / b for a, b in zip(calls[0], calls[1], strict=True)])
    return result


async def run(arguments: argparse.Namespace) -> None:
    """Print a line a load."""
    tokens = (arguments.tokens or ",").split(",")
    places = []
    for address in filter(None, (arguments.address, arguments.than)):
        places.append(Callers(*(Caller(address, token) for token in tokens)))
    for name in LOADS:
        if arguments.loads in name.lower():
            print(json.dumps(await compare(places, name, arguments.runs, arguments.new)), flush=True)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("address")
    parser.add_argument("--than", help="address of a scheduler to compare with")
    parser.add_argument("--tokens", help="of two identities, with a comma between")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--loads", default="", help="only loads with this in their name")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
