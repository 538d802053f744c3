"""Hostile grammars through Generate: what they are told, how long that takes, what a stream beside them sees.

usage: python -m tests.bench.hostile_grammars [--count 10000] [--at-once 4] [--seed 5] [--json FILE]

Grammars are drawn as in tests/fuzz/hostile_grammars.py, and now and then one of those that once ended or
stopped an executor, or held it up. A call must end with a completion, with INVALID_ARGUMENT that names the
field, or, as all calls have one identity, with RESOURCE_EXHAUSTED and a time to retry after. The client has
`--at-once` calls open on one connection, and their times include waiting for a turn; before, each of those
known is sent alone, which tells what it costs without waiting. Beside them
runs one request, again and again: its tokens must stay those of the first time. Prints the codes, the
distribution of the calls' times, the processes' memory after a fifth and at the end, and a verdict; exit
status 1 if a figure is beyond its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc

from executor_service.grammar.source import GrammarSource
from tests.bench.figures import Line, report
from tests.fuzz.hostile_grammars import HostileGrammars
from tests.support.stack import Stack, oracle_stack

MAX_CALL_S, MAX_GROWTH_MB = 2.0, 100.0
TOKENS, CANARY_TOKENS = 12, 200
KNOWN_EVERY = 500
_CHAIN = "".join(f"T{i}: T{i + 1}\n" for i in range(5500))
_PREFIX = "/[a-d]/ " * 4  # beyond what is tried when a grammar is compiled
_ARRAYS = [{"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": i % 7} for i in range(900)]
KNOWN = [
    GrammarSource("json_schema", '{"const": -9223372036854775808}'),
    GrammarSource("lark", 'start: %json {"const": -9223372036854775807}'),
    GrammarSource("lark", f'start: T0\n{_CHAIN}T5500: "a"'),
    GrammarSource("lark", f'start: T0\n{_CHAIN}T5500: "a"'.replace("T", "t")),
    GrammarSource("lark", 'start: a::0x0\na::_: "a" %if lt(_,5) | a::incr(_) "b"'),
    GrammarSource(
        "lark", "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(2000)) + 'T2000: "a"'
    ),
    GrammarSource("regex", "a?" * 30_000),
    GrammarSource("regex", "((a{100}){100}){100}"),
    GrammarSource("lark", 'start: e\ne: e e e | e e | "a" | '),
    GrammarSource("json_schema", json.dumps({"$ref": "http://127.0.0.1:1/x"})),
    GrammarSource("choices", choices=tuple(f"{i:04d}" for i in range(9000))),
    GrammarSource("json_schema", json.dumps({"$defs": {"x": {"anyOf": _ARRAYS}}, "$ref": "#/$defs/x"})),
    GrammarSource("regex", "a*" * 3000),
    GrammarSource("regex", '[^"]*' * 500),
    *(
        GrammarSource("lark", f"start: {_PREFIX} e\ne: {rule}")
        for rule in ('e e e | e e | "a" |', "e e | " * 30 + '"a" |', "e e | " * 300 + '"a" |')
    ),
    GrammarSource("lark", f'start: {_PREFIX} (e ";")*\ne: e e e | e e | "a"'),
]


@dataclass
class Tally:
    """What came of the calls."""

    codes: Counter[str] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")


def message(source: GrammarSource) -> pb.Grammar:
    """As a client sends it."""
    if source.kind == "choices":
        return pb.Grammar(choices=pb.Choices(choices=source.choices))
    return pb.Grammar(**{source.kind: source.text})  # type: ignore[arg-type]


async def call(stub: rpc.SchedulerServiceAsyncStub, source: GrammarSource, seed: int, tally: Tally) -> None:
    """One grammar."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), grammar=message(source))
    request.stop.max_tokens, request.sampling.temperature, request.sampling.seed = TOKENS, 1.0, seed
    began = time.perf_counter()
    try:
        async for _ in stub.Generate(request):
            pass
        code = "OK"
    except grpc.aio.AioRpcError as error:
        code = error.code().name
        named = code == "INVALID_ARGUMENT" and "grammar" in (error.details() or "")
        if not named and not (code == "RESOURCE_EXHAUSTED" and retry_after_s(error)):
            tally.odd.append(f"{code} {error.details()}: {source.kind} {source.text[:100]!r}")
    seconds = time.perf_counter() - began
    tally.codes[code] += 1
    tally.seconds.append(seconds)
    tally.slowest = max(tally.slowest, (seconds, f"{source.kind} {source.text[:60]!r}"))


def retry_after_s(error: grpc.aio.AioRpcError) -> float:
    """What the details of a status say; 0: they say nothing."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            for detail in Status.FromString(value).details:
                info = RetryInfo()
                if detail.Unpack(info):
                    return float(info.retry_delay.ToTimedelta().total_seconds())
    return 0.0


async def canary(stub: rpc.SchedulerServiceAsyncStub) -> list[int]:
    """The same tokens each time."""
    stop = pb.StopConditions(max_tokens=CANARY_TOKENS, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7, 8, 9]), stop=stop)
    request.sampling.temperature, request.sampling.seed = 1.0, 99
    ids: list[int] = []
    async for event in stub.Generate(request):
        ids += event.delta.token_ids
    return ids


def grammars(seed: int, count: int) -> Iterator[tuple[int, GrammarSource]]:
    """Drawn ones, and known ones between them."""
    drawn, known = HostileGrammars(seed), random.Random(seed)
    for number in range(count):
        special = number % KNOWN_EVERY == KNOWN_EVERY // 2
        yield number, known.choice(KNOWN) if special else drawn.draw()
    yield from itertools.zip_longest(range(count, count + len(KNOWN)), KNOWN)


async def measure(stack: Stack, count: int, at_once: int, seed: int) -> list[Line]:
    """Send all; the figures."""
    tally, queue = Tally(), grammars(seed, count)
    pids = {"scheduler": stack.scheduler.pid, "executor": stack.executor(stack.addresses[0]).pid}
    early: dict[str, float] = {}
    changed = rounds = 0
    async with grpc.aio.insecure_channel(stack.scheduler.address) as channel:
        stub = rpc.SchedulerServiceStub(channel)
        undisturbed = await canary(stub)
        alone = Tally()
        for number, source in enumerate(KNOWN):
            await call(stub, source, number, alone)
        done = asyncio.Event()

        async def attack() -> None:
            for number, source in queue:
                await call(stub, source, number, tally)
                if len(tally.seconds) == count // 5:
                    early.update({name: resident_mb(pid) for name, pid in pids.items()})

        async def watch() -> None:
            nonlocal changed, rounds
            while not done.is_set():
                rounds += 1
                changed += await canary(stub) != undisturbed

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(attack() for _ in range(at_once)))
        done.set()
        await watching
    grown = {name: resident_mb(pid) - early[name] for name, pid in pids.items()}
    cuts = statistics.quantiles(tally.seconds, n=1000)
    print(f"{len(KNOWN)} known ones alone: {dict(alone.codes)}, ", end="")
    print(f"slowest {alone.slowest[0]:.2f} s: {alone.slowest[1]}")
    print(f"{len(tally.seconds)} calls, {at_once} at once: {dict(tally.codes)}; {rounds} canary requests")
    times = ", ".join(f"{name} {cuts[at] * 1e3:.0f} ms" for name, at in (("p50", 499), ("p90", 899)))
    print(f"calls took: {times}, p99 {cuts[989] * 1e3:.0f} ms, p99.9 {cuts[998] * 1e3:.0f} ms, ", end="")
    print(f"slowest {tally.slowest[0]:.2f} s: {tally.slowest[1]}")
    print("memory:", ", ".join(f"{name} {early[name]:.0f} MB {mb:+.0f}" for name, mb in grown.items()))
    print(*(alone.odd + tally.odd)[:20], sep="\n")
    restarts = sum(not stack.executor(address).running for address in stack.addresses)
    return [
        Line("hostile grammars", "calls with any other code", len(tally.odd) + len(alone.odd), most=0),
        Line("hostile grammars", "executors that ended", restarts, most=0),
        Line("hostile grammars", "canary requests with other tokens", changed, most=0),
        Line("hostile grammars", "slowest call alone, s", alone.slowest[0], most=MAX_CALL_S),
        Line("hostile grammars", "slowest call, s", tally.slowest[0], most=MAX_CALL_S),
        *(
            Line("hostile grammars", f"growth of the {name}, MB", mb, most=MAX_GROWTH_MB)
            for name, mb in grown.items()
        ),
    ]


def resident_mb(pid: int) -> float:
    """Resident memory of a process."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> int:
    """Parse, start the services, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    quiet = ["--log-level", "error"]
    with (
        tempfile.TemporaryDirectory() as directory,
        oracle_stack(Path(directory), executor=["--step-ms", "1", *quiet], scheduler=quiet) as stack,
    ):
        lines = asyncio.run(measure(stack, arguments.count, arguments.at_once, arguments.seed))
    return report(lines, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
