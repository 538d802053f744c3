"""The OpenAI API beside gRPC: CPU time a token, first tokens, tokens/s, and a polite caller's wait.

usage: python -m tests.bench.door_load [cost] [first] [rate] [fair] [--pairs 3] [--json FILE]

    cost   64 streams: CPU time of the door for a token / of a process with `paceline.aio.Client` (<= 1.6)
    first  one request after the other: median time to the first token, HTTP less gRPC (<= 5 ms)
    rate   32 streams, steps of 20 ms: tokens/s by HTTP / by gRPC (>= 0.99)
    fair   a polite caller's first token, beside 600 streams of a greedy one / alone (<= 3)

The oracle, real processes over loopback. Readers are processes of their own. HTTP and gRPC alternate
`--pairs` times; each figure is the median of the pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from paceline import errors
from paceline.aio import Client
from paceline.channel import Security
from service_kit.identity import token_hash

from tests.bench.figures import Line, report
from tests.support.checkout import ROOT
from tests.support.processes import ServiceProcess
from tests.support.stack import oracle_stack

KEYS = {"polite": "polite" * 4, "greedy": "greedy" * 4}
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Reader:
    """A process that reads `streams` at once, each of `tokens`, `rounds` times (0: until it is ended)."""

    way: str  # http, grpc
    address: str
    streams: int = 1
    tokens: int = 100
    rounds: int = 1
    pause_s: float = 0.0  # between rounds

    def start(self, key: str) -> subprocess.Popen[str]:
        """Start it."""
        command = [sys.executable, "-m", "tests.bench.door_load", "--reader", json.dumps([vars(self), key])]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def run(self, key: str) -> Any:
        """What it found, once it has ended."""
        with self.start(key) as process:
            assert process.stdout is not None
            return json.loads(process.stdout.read())

    async def read(self, key: str) -> dict[str, Any]:
        """Read: tokens, seconds, CPU seconds, times to first tokens."""
        found: dict[str, Any] = {"tokens": 0, "first_s": []}
        async with Client(
            self.address if self.way == "grpc" else "127.0.0.1:9", security=Security(token=key)
        ) as client:

            async def stream(number: int) -> None:
                done = 0
                while not self.rounds or done < self.rounds:
                    events = self._grpc(client, number) if self.way == "grpc" else self._http(key, number)
                    began, fresh = time.monotonic(), True
                    try:
                        async for count in events:
                            if fresh:
                                found["first_s"].append(time.monotonic() - began)
                                fresh = False
                            found["tokens"] += count
                        done += 1
                    except (errors.PacelineError, OSError):  # a full queue
                        await asyncio.sleep(0.5)
                    await asyncio.sleep(self.pause_s)

            began, cpu = time.monotonic(), time.process_time()
            await asyncio.gather(*(stream(number) for number in range(self.streams)))
            return found | {"seconds": time.monotonic() - began, "cpu_s": time.process_time() - cpu}

    async def _grpc(self, client: Client, number: int) -> AsyncIterator[int]:
        options: dict[str, Any] = {
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "seed": number,
            "returns": "text",
        }
        async for event in client.generate(f"Request {number}", **options):
            yield int(hasattr(event, "text"))

    async def _http(self, key: str, number: int) -> AsyncIterator[int]:
        host, _, port = self.address.partition(":")
        fields = {"max_tokens": self.tokens, "ignore_eos": True, "seed": number, "stream": True}
        body = json.dumps({"prompt": f"Request {number}", **fields}).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            if b" 200 " not in await reader.readline():
                raise OSError("refused")
            async for line in reader:
                if line.startswith(b"data: {"):
                    yield 1
                elif line.startswith(b"data: [DONE]"):
                    return
        finally:
            writer.close()


@contextmanager
def served(step_ms: float, *scheduler: str) -> Iterator[tuple[dict[str, str], int]]:
    """The address of either way to one stack, by name, and the door's process id."""
    with tempfile.TemporaryDirectory() as name:
        tokens = Path(name) / "tokens.yaml"
        tokens.write_text("".join(f"- {{name: {n}, sha256: {token_hash(k)}}}\n" for n, k in KEYS.items()))
        flags = ("--tokens-file", str(tokens), *scheduler)
        with oracle_stack(Path(name), executor=("--step-ms", f"{step_ms:g}"), scheduler=flags) as stack:
            door = ServiceProcess(
                "paceline_openai", ["--scheduler", stack.scheduler.address], Path(name) / "door"
            )
            try:
                yield {"http": door.address, "grpc": stack.scheduler.address}, door.pid
            finally:
                door.kill()


def cpu_s(pid: int) -> float:
    """CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def cost(pairs: int) -> Iterator[Line]:
    """CPU time a token: the door's beside that of the SDK's client."""
    ratios = []
    with served(10) as (ways, door):
        for way in ("http", "grpc"):
            Reader(way, ways[way], 64, 50).run(KEYS["polite"])
        for _ in range(pairs):
            before = cpu_s(door)
            tokens = Reader("http", ways["http"], 64, 400).run(KEYS["polite"])["tokens"]
            by_http = (cpu_s(door) - before) / tokens
            found = Reader("grpc", ways["grpc"], 64, 400).run(KEYS["polite"])
            by_grpc = found["cpu_s"] / found["tokens"]
            ratios.append(by_http / by_grpc)
            print(
                f"cost: {1e6 * by_http:.0f} us a token in the door, {1e6 * by_grpc:.0f} us in aio.Client",
                flush=True,
            )
    yield Line("cost", "CPU a token, door / aio.Client", statistics.median(ratios), most=1.6)


def first(pairs: int) -> Iterator[Line]:
    """First tokens, one request after the other."""
    more = []
    with served(10) as (ways, _):
        for _ in range(pairs + 1):
            medians = {
                way: statistics.median(Reader(way, ways[way], 1, 2, 40).run(KEYS["polite"])["first_s"])
                for way in ways
            }
            more.append(1000 * (medians["http"] - medians["grpc"]))
            print("first:", {way: f"{1000 * one:.1f} ms" for way, one in medians.items()}, flush=True)
    yield Line("first", "first token, HTTP less gRPC, ms", statistics.median(more[1:]), most=5.0)


def rate(pairs: int) -> Iterator[Line]:
    """Tokens/s of 32 streams."""
    ratios = []
    with served(20) as (ways, _):
        for _ in range(pairs):
            rates = {}
            for way in ways:
                found = Reader(way, ways[way], 32, 300).run(KEYS["polite"])
                rates[way] = found["tokens"] / found["seconds"]
            ratios.append(rates["http"] / rates["grpc"])
            print("rate:", {way: f"{one:.0f} tokens/s" for way, one in rates.items()}, flush=True)
    yield Line("rate", "tokens/s, HTTP / gRPC", statistics.median(ratios), least=0.99)


def fair(pairs: int) -> Iterator[Line]:
    """A polite caller's first token beside a greedy one."""
    found: dict[str, list[float]] = {"http": [], "grpc": []}
    with served(20, "--max-running", "32", "--max-queued-requests", "1000") as (ways, _):
        for _ in range(pairs):
            for way, address in ways.items():
                polite = Reader(way, address, 1, 10, 40, 0.05)
                alone = statistics.median(polite.run(KEYS["polite"])["first_s"])
                greedy = Reader(way, address, 600, 50, 0).start(KEYS["greedy"])
                try:
                    time.sleep(4)
                    beside = statistics.median(polite.run(KEYS["polite"])["first_s"])
                finally:
                    greedy.kill()
                    greedy.wait()
                found[way].append(beside / alone)
                print(f"fair: {way} {1000 * alone:.1f} ms alone, {1000 * beside:.1f} ms beside", flush=True)
                time.sleep(1)
    for way, ratios in found.items():
        name = f"polite first token by {way}, beside 600 / alone"
        yield Line("fair", name, statistics.median(ratios), most=3.0 if way == "http" else None)


SCENARIOS = {"cost": cost, "first": first, "rate": rate, "fair": fair}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, and run."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.reader:
        fields, key = json.loads(given.reader)
        with suppress(KeyboardInterrupt):
            print(json.dumps(uvloop.run(Reader(**fields).read(key))))
        return 0
    print(f"load average {os.getloadavg()[0]:.1f}")
    lines = [line for name in given.scenarios or SCENARIOS for line in SCENARIOS[name](given.pairs)]
    return report(lines, given.json)


if __name__ == "__main__":
    sys.exit(main())
