"""Time that the worker protocol and the OpenAI gateway add, to the first token and to each further one.

usage: python -m tests.bench.gateway_overhead [--pairs 9] [--streams 1,8] [--step-ms 5] [--tokens 200]

The same prompt goes to one oracle stack over Generate (ours), over the worker protocol without the gateway
(worker), and over HTTP through the gateway (http), in turn in each pair. Prints medians, and the medians of
the differences to ours, as JSON lines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

from tests.gateway.support import BackStack, gateway

PROMPT = "Once upon a time, there was a fox that counted its own steps. "  # a token for each byte

Times = tuple[float, float]
"""Seconds to the first token, and seconds for each further one."""
Door = Callable[[int], Awaitable[Times]]
"""door(tokens) asks for so many tokens."""


def times(began: float, stamps: list[tuple[float, int]]) -> Times:
    """`stamps`: when messages came, and how many tokens each had."""
    tokens = sum(count for _, count in stamps[1:])
    return stamps[0][0] - began, (stamps[-1][0] - stamps[0][0]) / max(1, tokens)


def ours(address: str) -> Door:
    stub = SchedulerServiceStub(grpc.aio.insecure_channel(address))
    ids = list(PROMPT.encode())

    async def ask(tokens: int) -> Times:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), returns=pb.RETURNS_TOKEN_IDS)
        request.stop.max_tokens, request.stop.ignore_eos = tokens, True
        began, stamps = time.perf_counter(), []
        async for message in stub.Generate(request):
            if message.HasField("delta"):
                stamps.append((time.perf_counter(), len(message.delta.token_ids)))
        return times(began, stamps)

    return ask


def worker(address: str) -> Door:
    from smg_grpc_proto.generated import vllm_engine_pb2 as worker_pb
    from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

    stub = VllmEngineStub(grpc.aio.insecure_channel(address))
    tokenized = worker_pb.TokenizedInput(input_ids=list(PROMPT.encode()))
    number = iter(range(1 << 30))

    async def ask(tokens: int) -> Times:
        request = worker_pb.GenerateRequest(
            request_id=f"bench-{next(number)}",
            tokenized=tokenized,
            stream=True,
            sampling_params=worker_pb.SamplingParams(max_tokens=tokens, ignore_eos=True),
        )
        began, stamps = time.perf_counter(), []
        async for message in stub.Generate(request):
            if message.HasField("chunk"):
                stamps.append((time.perf_counter(), len(message.chunk.token_ids)))
        return times(began, stamps)

    return ask


def http(url: str) -> Door:
    """A plain HTTP client, so that an SDK's parsing is not measured. Its chunks need not be tokens."""
    host, _, port = url.removeprefix("http://").removesuffix("/v1").rpartition(":")

    async def ask(tokens: int) -> Times:
        body = {"model": "oracle", "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        began, stamps = time.perf_counter(), []
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b"data: "):
                stamps.append((time.perf_counter(), 1))
        writer.close()
        first_s, last_s = stamps[0][0] - began, stamps[-1][0] - stamps[0][0]
        return first_s, last_s / (tokens - 1)

    return ask


async def measure(doors: dict[str, Door], pairs: int, streams: int, tokens: int) -> dict[str, object]:
    found: dict[str, list[Times]] = {name: [] for name in doors}
    for pair in range(pairs + 1):  # the first one warms up
        for name, door in doors.items():
            several = await asyncio.gather(*(door(tokens) for _ in range(streams)))
            if pair:
                found[name].append(
                    (
                        statistics.median(one[0] for one in several),
                        statistics.median(one[1] for one in several),
                    )
                )

    def median_ms(name: str, which: int, beside: str = "") -> float:
        pairs_of = zip(found[name], found[beside or name], strict=True)
        return round(1000 * statistics.median(a[which] - (b[which] if beside else 0) for a, b in pairs_of), 3)

    return {
        "streams": streams,
        "first_token_ms": {name: median_ms(name, 0) for name in doors},
        "token_ms": {name: median_ms(name, 1) for name in doors},
        "added_to_first_token_ms": {name: median_ms(name, 0, "ours") for name in doors if name != "ours"},
        "added_to_token_ms": {name: median_ms(name, 1, "ours") for name in doors if name != "ours"},
    }


async def run(stack: BackStack, url: str, given: argparse.Namespace) -> None:
    doors = {"ours": ours(stack.serve.address), "worker": worker(stack.worker), "http": http(url)}
    for streams in map(int, given.streams.split(",")):
        print(json.dumps(await measure(doors, given.pairs, streams, given.tokens)), flush=True)


def main() -> None:
    """Parse the command line, and measure."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--step-ms", type=float, default=5.0, help="of the oracle")
    parser.add_argument("--tokens", type=int, default=200)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        stack = BackStack(Path(name) / "stack", "-E", f"step-ms={given.step_ms}")
        try:
            assert stack.serve.address
            with gateway(Path(name), [stack.worker], "--log-level", "error") as url:
                asyncio.run(run(stack, url, given))
        finally:
            stack.stop()


if __name__ == "__main__":
    main()
