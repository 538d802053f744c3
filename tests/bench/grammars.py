"""Speed of constrained output on the default model: beside unconstrained output, and what its parts cost.

usage: python -m tests.bench.grammars [--parts masks,plain,drafts,neighbours] [--dtypes float32,int8]
           [--streams 1,8,32] [--pairs 7] [--new 96] [--check]

    masks       median, mean and largest time of a mask, and of compiling, by the vocabulary's size
    plain       constrained beside unconstrained requests, speculation off
    drafts      at one stream, with the grammar's forced tokens as drafts, beside plain unconstrained decoding
    neighbours  31 free streams beside a constrained one, against 32 free ones

A pair is one run of each kind, in an order that alternates from pair to pair, so that a drifting machine
cancels in a pair's ratios. Rates are tokens per second while all streams of a run decode; no stream ends
earlier: schemas ask for more items than fit, and the other requests ignore the model's end. Printed are
medians over the pairs, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc

from tests.bench.grammar_costs import Costs, forced_share, print_costs
from tests.bench.load import Stream, decode_tok_s
from tests.model.default_model import default_model
from tests.support.stack import oracle_stack

PROMPT = "Here are the records of the people in the register, as JSON. Record number {}: "
GOALS = {("float32", 1): 0.95, ("float32", 8): 0.95, ("float32", 32): 0.92, ("int8", 32): 0.88}
"""Least rate of constrained requests, as a share of that of unconstrained ones, by dtype and streams."""
DRAFTS_GOAL, DRAFTS_SHARE, NEIGHBOURS_GOAL = 1.2, 0.25, 0.97


def records(properties: dict[str, Any]) -> str:
    """A schema of a list of objects with these properties, longer than any answer here."""
    item = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return json.dumps({"type": "array", "items": item, "minItems": 200})


_TEXT = {"type": "string", "maxLength": 40}
_COLOUR = {"enum": ["black", "white", "turquoise", "ultramarine"]}
SCHEMAS = {
    "people": records(
        {"name": _TEXT, "born": {"type": "string", "format": "date"}, "married": {"type": "boolean"}}
    ),
    "measurements": records(
        {"temperature_celsius": {"type": "number"}, "humidity_percent": {"type": "integer", "maximum": 100}}
    ),
    "orders": records(
        {"order_number": {"type": "integer"}, "colour": _COLOUR, "express_delivery": {"type": "boolean"}}
    ),
    "prose": records({"text": {"type": "string"}}),
}
PLAIN_SCHEMA = "people"


def request(
    index: int, new: int, schema: str | None, speculation: pb.Speculation | None
) -> pb.GenerateRequest:
    """Stream `index` of a run; unconstrained without a schema, and plain without speculation."""
    made = pb.GenerateRequest(
        text=PROMPT.format(index),
        sampling=pb.SamplingParams(temperature=0.8, seed=index),
        stop=pb.StopConditions(max_tokens=new, ignore_eos=schema is None),
        speculation=speculation or pb.Speculation(mode=pb.SPECULATION_MODE_OFF),
        returns=pb.RETURNS_TOKEN_IDS,
    )
    if schema is not None:
        made.grammar.json_schema = schema
    return made


class Streams:
    """Runs of several streams at once against one scheduler."""

    def __init__(self, stub: rpc.SchedulerServiceAsyncStub) -> None:
        self._stub = stub
        self.usages: list[pb.Usage] = []  # of the last run
        self.outputs: list[list[int]] = []  # of the last run

    async def run(self, requests: Sequence[pb.GenerateRequest]) -> list[Stream]:
        """All at once. Raises RuntimeError for a stream that ends early."""
        self.usages, self.outputs = [], []
        return list(await asyncio.gather(*map(self._stream, requests)))

    async def _stream(self, message: pb.GenerateRequest) -> Stream:
        stream, output = Stream(time.monotonic()), list[int]()
        async for event in self._stub.Generate(message):
            stream.arrivals += [time.monotonic()] * len(event.delta.token_ids)
            output += event.delta.token_ids
            if event.HasField("finished"):
                self.usages.append(event.finished.usage)
        if len(output) != message.stop.max_tokens:
            raise RuntimeError(f"asked for {message.stop.max_tokens} tokens, got {len(output)}")
        self.outputs.append(output)
        return stream


Kind = Callable[[], Any]


async def pairs(one: Kind, other: Kind, count: int) -> tuple[list[float], list[float]]:
    """The rates of `count` pairs of runs."""
    rates: tuple[list[float], list[float]] = ([], [])
    await one(), await other()  # prompts are cached then, and kernels compiled
    for pair in range(count):
        for kind in (0, 1) if pair % 2 == 0 else (1, 0):
            rates[kind].append(await (one, other)[kind]())
    return rates


def told(ratios: Sequence[float]) -> str:
    """Median, smallest and largest."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})"


class Bench:
    """The measurements against one stack."""

    def __init__(self, streams: Streams, dtype: str, args: argparse.Namespace) -> None:
        self._streams, self._dtype, self._args = streams, dtype, args
        self.missed: list[str] = []

    async def plain(self) -> None:
        """Constrained and unconstrained requests, speculation off."""
        for count in map(int, self._args.streams.split(",")):
            constrained, free = await pairs(
                self._rate(count, [SCHEMAS[PLAIN_SCHEMA]] * count), self._rate(count, [None] * count),
                self._args.pairs,
            )  # fmt: skip
            ratios = [a / b for a, b in zip(constrained, free, strict=True)]
            self._tell(
                f"{count} streams: constrained {statistics.median(constrained):.1f}, unconstrained "
                f"{statistics.median(free):.1f} tok/s, ratio {told(ratios)}",
                ratios,
                GOALS.get((self._dtype, count)),
            )

    async def drafts(self) -> None:
        """One stream with what its grammar forces as drafts."""
        drafted = pb.Speculation(mode=pb.SPECULATION_MODE_AUTO, drafter=pb.DRAFTER_GRAMMAR)
        plain = self._rate(1, [None])
        for name, schema in SCHEMAS.items():
            usages: list[pb.Usage] = []
            outputs: list[list[int]] = []
            constrained = self._rate(1, [schema], drafted)

            async def run() -> float:
                rate = await constrained()  # noqa: B023  # awaited in this turn of the loop
                usages.extend(self._streams.usages)  # noqa: B023
                outputs.extend(self._streams.outputs)  # noqa: B023
                return rate

            rates = await pairs(run, plain, self._args.pairs)
            ratios = [a / b for a, b in zip(*rates, strict=True)]
            share = forced_share(schema, outputs)
            tried = sum(usage.grammar_drafted_tokens for usage in usages)
            accepted = sum(usage.grammar_accepted_tokens for usage in usages)
            self._tell(
                f"{name}: {share:.0%} of the tokens forced, {accepted} of {tried} drafts accepted; with "
                f"them {statistics.median(rates[0]):.1f}, unconstrained {statistics.median(rates[1]):.1f} "
                f"tok/s, ratio {told(ratios)}",
                ratios,
                DRAFTS_GOAL if share >= DRAFTS_SHARE else None,
            )

    async def neighbours(self) -> None:
        """31 free streams, beside a constrained one and beside a free one."""
        schema = SCHEMAS[PLAIN_SCHEMA]
        beside, free = await pairs(
            self._rate(32, [None] * 31 + [schema], of=31),
            self._rate(32, [None] * 32, of=31),
            self._args.pairs,
        )
        ratios = [a / b for a, b in zip(beside, free, strict=True)]
        self._tell(f"31 free streams beside a constrained one: ratio {told(ratios)}", ratios, NEIGHBOURS_GOAL)

    def _rate(
        self, count: int, schemas: list[str | None], speculation: pb.Speculation | None = None, of: int = 0
    ) -> Kind:
        """A run of `count` streams; its result is the rate of all, or of the first `of`."""
        requests = [request(i, self._args.new, schemas[i], speculation) for i in range(count)]

        async def run() -> float:
            done = await self._streams.run(requests)
            return decode_tok_s(done[:of] if of else done)

        return run

    def _tell(self, text: str, ratios: Sequence[float], goal: float | None) -> None:
        reached = goal is None or round(statistics.median(ratios), 2) >= goal
        print(f"{self._dtype}, {text}" + ("" if goal is None else f"; goal {goal}"), flush=True)
        if not reached:
            self.missed.append(f"{self._dtype}, {text}: the goal is {goal}")


async def bench_all(address: str, dtype: str, args: argparse.Namespace) -> list[str]:
    """The parts that need a server; returns the goals that were missed."""
    async with grpc.aio.insecure_channel(address) as channel:
        bench = Bench(Streams(rpc.SchedulerServiceStub(channel)), dtype, args)
        for part in args.parts.split(","):
            if part != "masks":
                await getattr(bench, part)()
    return bench.missed


@contextmanager
def own_stack(dtype: str) -> Iterator[str]:
    """The default model behind a scheduler; its address."""
    executor = ["--backend", "torch", "--model", str(default_model()), "--dtype", dtype]
    with tempfile.TemporaryDirectory() as scratch, oracle_stack(Path(scratch), executor=executor) as stack:
        yield stack.scheduler.address


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="masks,plain,drafts,neighbours")
    parser.add_argument("--dtypes", default="float32,int8")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--new", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a goal is missed")
    args = parser.parse_args()
    if "masks" in args.parts.split(","):
        print_costs(Costs(SCHEMAS))
    missed: list[str] = []
    if args.parts != "masks":
        for dtype in args.dtypes.split(","):
            with own_stack(dtype) as address:
                missed += asyncio.run(bench_all(address, dtype, args))
    print("\n".join(missed) or "all goals reached")
    if args.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
