"""What polite clients wait for their first token beside one that floods, and among themselves.

    python -m tests.bench.fairness                            # the oracle, light and heavy polite clients
    python -m tests.bench.fairness --backend model            # the default model
    python -m tests.bench.fairness --streams 1 --runs 3 --json out.json

Eleven identities of a tokens file, all over gRPC against real processes. In one setting all eleven are
polite: each keeps `streams` requests going, one after the other with pauses, over a connection of its own. In
the other ten are, and the eleventh sends 10,000 requests at once, over one connection, from a process
of its own. Both settings alternate; requests are counted from the flood's first one on, so that refusing the
surplus is part of it. Reported is the p99 of polite times to the first token beside the flood, divided by the
p99 of eleven polite ones: the median of all runs, with the least and the most. At most 1.5 is expected.

A run takes 60 s. The flood's first calls arrive within 0.4 s and delay those that arrive meanwhile by as much
at most, which is printed as well: in runs of less than 40 s these are more than 1 % of all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import uvloop
import yaml
from paceline.channel import Link, Security, open_aio_channel, open_channel
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from service_kit.identity import token_hash

from tests.model.default_model import default_model
from tests.support.checkout import ROOT
from tests.support.stack import oracle_stack

IDENTITIES = 11
MAX_RATIO = 1.5
PAUSE_S = (0.1, 0.5)
"""Between two requests of a polite stream: uniform within."""
IDLE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Kind:
    """The executor, how much runs at once, and how long requests are."""

    seats: int
    prompt: int
    length: int
    seconds: float


KINDS = {"oracle": Kind(32, 32, 40, 60.0), "model": Kind(16, 32, 16, 60.0)}


@dataclass(frozen=True)
class Run:
    """One setting after the other; times to the first token in ms."""

    streams: int
    polite_p50: float
    polite_p99: float
    beside_p50: float
    beside_p99: float
    beside_max: float
    requests: int  # of polite clients, both settings
    flood: dict[str, int]  # how its requests ended until then, by status

    @property
    def ratio(self) -> float:
        """By how much the flood raises the polite clients' p99."""
        return self.beside_p99 / self.polite_p99


def token(identity: int) -> str:
    """Of one of the eleven; the last one floods."""
    return f"token-of-client-{identity}"


def request(prompt: int, length: int, rng: random.Random) -> pb.GenerateRequest:
    """Of exactly `length` tokens, decoded plainly."""
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[rng.randrange(256) for _ in range(prompt)]),
        stop=pb.StopConditions(max_tokens=length, ignore_eos=True),
        speculation=pb.Speculation(mode=pb.SPECULATION_MODE_OFF),
    )


# -- the polite clients' process -----------------------------------------------------------------


async def polite(address: str, clients: int, streams: int, kind: Kind, seed: int) -> None:
    """Print a line when all streams go; then, for each line of stdin, how long first tokens took since."""
    waits: list[float] = []
    going = [asyncio.create_task(_client(address, i, streams, kind, seed, waits)) for i in range(clients)]
    await asyncio.sleep(max(PAUSE_S) + 1.0)
    loop = asyncio.get_running_loop()
    print("going", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    waits.clear()
    await asyncio.sleep(kind.seconds)
    print(json.dumps(waits), flush=True)
    for task in going:
        task.cancel()
    await asyncio.gather(*going, return_exceptions=True)


async def _client(
    address: str, identity: int, streams: int, kind: Kind, seed: int, waits: list[float]
) -> None:
    security = Security(token=token(identity))
    async with open_aio_channel(address, Link.PUBLIC, security) as channel:
        stub: Any = SchedulerServiceStub(channel)

        async def stream(rng: random.Random) -> None:
            while True:
                await asyncio.sleep(rng.uniform(*PAUSE_S))
                asked = request(kind.prompt, kind.length, rng)
                sent = time.monotonic()
                first = 0.0
                async for event in stub.Generate(asked, metadata=security.metadata):
                    if not first and event.delta.token_ids:
                        first = time.monotonic() - sent
                        waits.append(first)

        async with asyncio.TaskGroup() as group:
            for number in range(streams):
                group.create_task(stream(random.Random(f"{seed} {identity} {number}")))


# -- the flood's process -------------------------------------------------------------------------


async def flood(address: str, count: int, connections: int, kind: Kind) -> None:
    """Send all at once; print how they have ended so far whenever a line comes from stdin."""
    security, rng = Security(token=token(IDENTITIES - 1)), random.Random(0)
    channels = [open_aio_channel(address, Link.PUBLIC, security) for _ in range(connections)]
    stubs: list[Any] = [SchedulerServiceStub(channel) for channel in channels]
    for stub in stubs:
        await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=security.metadata)
    requests = [request(kind.prompt, kind.length, rng) for _ in range(count)]
    ends: Counter[str] = Counter()

    async def call(number: int) -> None:
        try:
            generate = stubs[number % connections].Generate
            async for _ in generate(requests[number], metadata=security.metadata):
                pass
            ends["OK"] += 1
        except grpc.aio.AioRpcError as error:
            ends[error.code().name] += 1

    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, sys.stdin.readline)
    calls = [asyncio.create_task(call(number)) for number in range(count)]
    await loop.run_in_executor(None, sys.stdin.readline)
    print(json.dumps(dict(ends) | {"open": count - ends.total()}), flush=True)
    for task in calls:
        task.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    for channel in channels:
        await channel.close()


# -- the settings --------------------------------------------------------------------------------


class Child:
    """A process of this module that prints lines and is told to go on."""

    def __init__(self, role: str, address: str, backend: str, *arguments: str) -> None:
        command = (sys.executable, "-m", "tests.bench.fairness", "--role", role, "--address", address)
        self._process = subprocess.Popen(
            [*command, "--backend", backend, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        """The next one. Raises RuntimeError if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a client ended with status {self._process.wait()}")
        return line

    def go_on(self) -> None:
        """Let it take its next step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """Kill it if it still runs."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def child(role: str, address: str, backend: str, *arguments: str) -> Iterator[Child]:
    """One that is ended in any case."""
    process = Child(role, address, backend, *arguments)
    try:
        yield process
    finally:
        process.end()


def setting(address: str, backend: str, clients: int, options: argparse.Namespace, seed: int) -> list[float]:
    """Times to the first token among so many polite clients, in seconds."""
    flags = ("--clients", str(clients), "--streams", str(options.streams), "--seed", str(seed))
    with child("polite", address, backend, *flags) as process:
        process.line()
        process.go_on()
        return list(json.loads(process.line()))


def beside(
    address: str, backend: str, options: argparse.Namespace, seed: int
) -> tuple[list[float], dict[str, int]]:
    """Those of ten polite clients beside the flood, and how the flood's requests ended."""
    flags = ("--clients", str(IDENTITIES - 1), "--streams", str(options.streams), "--seed", str(seed))
    sizes = ("--flood", str(options.flood), "--connections", str(options.connections))
    with (
        child("flood", address, backend, *sizes) as hostile,
        child("polite", address, backend, *flags) as process,
    ):
        hostile.line()
        process.line()
        process.go_on()
        hostile.go_on()
        waits = list(json.loads(process.line()))
        hostile.go_on()
        return waits, dict(json.loads(hostile.line()))


def wait_idle(address: str) -> None:
    """Until nothing runs or waits there."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    with open_channel(address, Link.PUBLIC) as channel:
        stub: Any = SchedulerServiceStub(channel)
        metadata = Security(token=token(0)).metadata
        while time.monotonic() < deadline:
            status = stub.GetStatus(pb.GetStatusRequest(), metadata=metadata)
            if not status.running and not status.waiting:
                return
            time.sleep(0.1)
    raise RuntimeError(f"the scheduler is not idle after {IDLE_TIMEOUT_S:g} s")


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(address: str, options: argparse.Namespace) -> list[Run]:
    """All runs of one number of streams, printed as they come."""
    runs = []
    for number in range(options.runs):
        alone = setting(address, options.backend, IDENTITIES, options, number)
        wait_idle(address)
        crowded, ends = beside(address, options.backend, options, number)
        wait_idle(address)
        run = Run(
            streams=options.streams,
            polite_p50=quantile(alone, 0.5) * 1e3,
            polite_p99=quantile(alone, 0.99) * 1e3,
            beside_p50=quantile(crowded, 0.5) * 1e3,
            beside_p99=quantile(crowded, 0.99) * 1e3,
            beside_max=max(crowded) * 1e3,
            requests=len(alone) + len(crowded),
            flood=ends,
        )
        runs.append(run)
        print(
            f"{run.streams} streams each: eleven polite {run.polite_p50:.0f} / {run.polite_p99:.0f} ms "
            f"(p50 / p99), ten beside the flood {run.beside_p50:.0f} / {run.beside_p99:.0f} ms "
            f"(at most {run.beside_max:.0f}), "
            f"ratio {run.ratio:.2f}; {run.requests} requests; the flood's: {run.flood}",
            flush=True,
        )
    ratios = [run.ratio for run in runs]
    print(
        f"{options.streams} streams each: p99 beside the flood / among polite ones, median of {len(runs)}: "
        f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}], at most {MAX_RATIO}",
        flush=True,
    )
    return runs


def main() -> None:
    """Parse; start what is needed; measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", choices=KINDS, default="oracle")
    parser.add_argument(
        "--streams", type=_ints, default=[1, 3], help="of each polite client, one after the other"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--flood", type=int, default=10_000, help="requests at once")
    parser.add_argument("--connections", type=int, default=1, help="of the flood")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the oracle")
    parser.add_argument("--token-us", type=float, default=200.0, help="of the oracle")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", choices=("polite", "flood"), help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    parser.add_argument("--clients", type=int, default=IDENTITIES, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    kind = KINDS[options.backend]
    if options.role == "polite":
        uvloop.run(polite(options.address, options.clients, options.streams[0], kind, options.seed))
        return
    if options.role == "flood":
        uvloop.run(flood(options.address, options.flood, options.connections, kind))
        return
    executor = ["--pages", "8192", "--step-ms", str(options.step_ms), "--token-us", str(options.token_us)]
    if options.backend == "model":
        executor = ["--backend", "torch", "--model", str(default_model()), "--dtype", "float32"]
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as name:
        tokens = Path(name) / "tokens.yaml"
        names = [(f"client-{i}", token_hash(token(i))) for i in range(IDENTITIES)]
        tokens.write_text(yaml.safe_dump([{"name": who, "sha256": digest} for who, digest in names]))
        scheduler = ["--max-running", str(kind.seats), "--log-level", "warning", "--tokens-file", str(tokens)]
        with oracle_stack(Path(name), executor=executor, scheduler=scheduler) as stack:
            print(f"{options.backend}: {kind}", flush=True)
            for streams in options.streams:
                one = argparse.Namespace(**vars(options) | {"streams": streams})
                runs += measure(stack.scheduler.address, one)
    if options.json:
        told = [asdict(run) | {"ratio": run.ratio, "max_ratio": MAX_RATIO} for run in runs]
        options.json.write_text(json.dumps(told, indent=1) + "\n")


def _ints(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    main()
