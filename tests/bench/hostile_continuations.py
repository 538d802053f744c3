"""Long outputs to be continued under grammars that read slowly: the longest pause of a stream beside them.

usage: python -m tests.bench.hostile_continuations [--tokens 1000] [--at-once 2] [--seconds 60] [--json FILE]

The grammar is the slowest known one that is taken: 30 ms of CPU time for a token of its output. The stream
runs without a grammar, on the oracle with steps of 10 ms: first alone, then beside `--at-once` such
continuations, until these have their first token, for `--seconds` at most. Beside them a continuation of as
many tokens of honest JSON is timed. Only a quiet machine tells anything. Exit status 1 if a figure is beyond
its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import grpc.aio
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc

from tests.bench.figures import Line, report
from tests.support.stack import Stack, oracle_stack

MAX_PAUSE_S = 0.25
_ARRAYS = [{"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": i % 7} for i in range(240)]
SLOW = json.dumps({"$defs": {"x": {"anyOf": _ARRAYS}}, "$ref": "#/$defs/x"})
HONEST = json.dumps({"type": "array", "items": {"type": "integer"}})
PROMPT = [1, 2, 3]


def request(schema: str = "") -> pb.GenerateRequest:
    """A request for three tokens."""
    made = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), stop=pb.StopConditions(max_tokens=3))
    made.sampling.temperature, made.sampling.seed = 1.0, 5
    if schema:
        made.grammar.json_schema = schema
    return made


async def first_token_s(
    stub: rpc.SchedulerServiceAsyncStub, schema: str, output: bytes, wait_s: float
) -> float:
    """Seconds until a stream that continues `output` has a token; `wait_s`: it has had none until then."""
    begun = request(schema)
    started = pb.Started()
    async for event in stub.Generate(begun):
        if event.HasField("started"):
            started = event.started
    begun.sampling.CopyFrom(started.sampling)
    begun.stop.max_tokens = len(output) + 3
    begun.continuation.prompt_digest = started.prompt_digest
    begun.continuation.model_fingerprint = started.model_fingerprint
    begun.continuation.sampler = started.sampler
    begun.continuation.completions.add(token_ids=list(output), text_bytes=len(output))
    began = time.perf_counter()
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            async for event in stub.Generate(begun):
                if event.delta.token_ids:
                    break
    return time.perf_counter() - began


async def longest_pause_s(stub: rpc.SchedulerServiceAsyncStub, done: asyncio.Event) -> float:
    """The longest pause between two tokens of streams, one after another, until `done`."""
    longest = 0.0
    while not done.is_set():
        free = request()
        free.stop.max_tokens, free.stop.ignore_eos = 500, True
        last = None
        async for event in stub.Generate(free):
            if not event.delta.token_ids:
                continue
            now = time.perf_counter()
            longest = max(longest, now - (last or now))
            last = now
            if done.is_set():
                break
        if last is not None and done.is_set():
            break
    return longest


async def measure(stack: Stack, tokens: int, at_once: int, seconds: float) -> list[Line]:
    """Alone, then beside the others."""
    async with grpc.aio.insecure_channel(stack.scheduler.address) as channel:
        stub = rpc.SchedulerServiceStub(channel)
        honest_output = (b"[" + b"10, " * tokens)[:tokens].rstrip(b", ") + b","
        done = asyncio.Event()
        watching = asyncio.create_task(longest_pause_s(stub, done))
        await asyncio.sleep(5)
        done.set()
        alone = await watching
        honest_alone = await first_token_s(stub, HONEST, honest_output, seconds)
        done = asyncio.Event()
        watching = asyncio.create_task(longest_pause_s(stub, done))
        await asyncio.sleep(1)
        hostile = [
            asyncio.create_task(first_token_s(stub, SLOW, b"[" * (tokens + n), seconds))
            for n in range(at_once)
        ]
        await asyncio.sleep(1)
        honest = await first_token_s(stub, HONEST, honest_output, seconds)
        took = await asyncio.gather(*hostile)
        await asyncio.sleep(1)
        done.set()
        beside = await watching
    named = f"{at_once} x {tokens} tokens"
    return [
        Line("continuations", "longest pause of a stream alone, s", alone),
        Line("continuations", f"longest pause beside {named}, s", beside, most=MAX_PAUSE_S),
        Line("continuations", "first token of the last of them, s", max(took)),
        Line("continuations", "first token of honest JSON, s", honest_alone),
        Line("continuations", "first token of honest JSON beside them, s", honest),
    ]


def main() -> int:
    """Parse, start the services, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    quiet = ["--log-level", "error"]
    executor = ["--step-ms", "10", "--context-length", "16384", "--pages", "4096", *quiet]
    with (
        tempfile.TemporaryDirectory() as directory,
        oracle_stack(Path(directory), executor=executor, scheduler=quiet) as stack,
    ):
        lines = asyncio.run(measure(stack, arguments.tokens, arguments.at_once, arguments.seconds))
    return report(lines, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
