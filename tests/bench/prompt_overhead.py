"""What it costs to tokenize a prompt elsewhere: time to the first token, beside another tree of Paceline.

    python -m tests.bench.prompt_overhead [--tree DIRECTORY]      # 32 streams, prompts of 64 B, 1 and 4 KiB

Without `--tree` this tree alone. Each tree has an oracle that computes in no time (`--step-ms`) and a
scheduler; rounds of the trees alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc.aio
import uvloop
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc

from tests.support.checkout import ROOT

SIZES = (64, 1024, 4096)
LETTERS = "etaoin shrdlu"


@contextmanager
def service(tree: Path, module: str, *arguments: str) -> Iterator[str]:
    """One service of a tree; its address."""
    with tempfile.TemporaryDirectory() as directory:
        port = Path(directory) / "port"
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--port", "0", "--port-file", str(port), *arguments],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tree, tree / "clients" / "python")))},
            stderr=subprocess.DEVNULL,
        )
        try:
            while not port.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"{module} of {tree} ended")
                time.sleep(0.01)
            yield f"127.0.0.1:{port.read_text().strip()}"
        finally:
            process.kill()
            process.wait()


@contextmanager
def scheduler(tree: Path, step_ms: float) -> Iterator[str]:
    """A scheduler of a tree, with an oracle of the same tree."""
    flags = (
        "--backend",
        "oracle",
        "--pages",
        "32768",
        "--max-step-tokens",
        "65536",
        "--step-ms",
        f"{step_ms:g}",
    )
    with service(tree, "executor_service", *flags) as executor:
        chunks = ("--max-step-tokens", "65536", "--prefill-chunk-tokens", "8192")
        with service(tree, "scheduler_service", "--executor", executor, *chunks) as address:
            yield address


async def first_token_s(stub: rpc.SchedulerServiceAsyncStub, size: int, rng: random.Random) -> float:
    """Of one request."""
    text = "".join(rng.choices(LETTERS, k=size))
    stop = pb.StopConditions(max_tokens=8, ignore_eos=True)
    sent = time.monotonic()
    first = 0.0
    async for _ in stub.Generate(pb.GenerateRequest(text=text, stop=stop)):
        first = first or time.monotonic() - sent
    return first


async def one_round(address: str, streams: int, size: int, seconds: float) -> list[float]:
    """Each stream sends a request after the other, with a pause of up to 100 ms."""
    times: list[float] = []

    async def stream(stub: rpc.SchedulerServiceAsyncStub, seed: int) -> None:
        rng = random.Random(seed)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(0.1 * rng.random())
            times.append(await first_token_s(stub, size, rng))

    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.gather(*(stream(rpc.SchedulerServiceStub(channel), seed) for seed in range(streams)))
    return times


async def measure(addresses: list[str], streams: int, rounds: int, seconds: float) -> None:
    """Alternate, and print."""
    for size in SIZES:
        times: list[list[float]] = [[] for _ in addresses]
        for _ in range(rounds):
            for got, address in zip(times, addresses, strict=True):
                got += await one_round(address, streams, size, seconds)
        words = []
        for got in times:
            median, p99 = statistics.median(got) * 1e3, statistics.quantiles(got, n=100)[98] * 1e3
            words.append(f"median {median:.2f}, p99 {p99:.2f} ms ({len(got)} requests)")
        print(f"{size} bytes, {streams} streams: {'; other tree '.join(words)}", flush=True)


def main() -> None:
    """Parse, start the services, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tree", type=Path, help="another checkout")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=0.0, help="of the oracles")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a round")
    arguments = parser.parse_args()
    trees = [ROOT, *([arguments.tree.resolve()] if arguments.tree else [])]
    with ExitStack() as stack:
        addresses = [stack.enter_context(scheduler(tree, arguments.step_ms)) for tree in trees]
        time.sleep(3)  # they greet each other
        uvloop.run(measure(addresses, arguments.streams, arguments.rounds, arguments.seconds))


if __name__ == "__main__":
    main()
