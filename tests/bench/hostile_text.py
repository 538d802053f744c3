"""What hostile text costs its neighbours: a canary stream's longest gap, and health's answers.

    python -m tests.bench.hostile_text             # 5 runs of each, some 4 minutes
    python -m tests.bench.hostile_text --runs 1 --check --json out.json

Twelve tokenizations of 1 MiB of digits at once, then twelve chats whose template never ends (1 s of CPU
time each, the limit given); after each of them, for as long a time but at most 10 s, the same canary
undisturbed. All are
sent by a process of its own. The oracle takes `--step-ms` a step, and the canary is one stream of it.
Reported are medians of the runs; `--check` fails where a gap exceeds 3 times the undisturbed one and
150 ms, or health's p99 100 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc.aio
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc

from tests.support.doctored_executor import doctored_stack

MAX_UNDISTURBED_S = 10.0
DIGITS = ("1234567890" * 104_858)[: 1 << 20]
TEMPLATE = (
    "{% if messages[0].content == 'loop' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ messages[0].content }}"
)
CANARY_TOKENS = 100_000
HEALTH_INTERVAL_S = 0.02
MAX_GAP_MS, MAX_GAP_RATIO, MAX_HEALTH_MS = 150.0, 3.0, 100.0


@dataclass(frozen=True)
class Seen:
    """By one canary."""

    gap_ms: float  # the longest
    health_ms: float  # the 99th percentile


@dataclass(frozen=True)
class Found:
    """Medians of some runs of one attack, in ms, and their bounds."""

    kind: str
    gap: float
    max_gap: float
    health: float
    max_health: float

    @property
    def good(self) -> bool:
        """Within the bounds."""
        return self.gap <= self.max_gap and self.health <= self.max_health


class Canary:
    """A stream of tokens and a health check every 20 ms."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._scheduler = rpc.SchedulerServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    async def watch(self, until: asyncio.Future[object]) -> Seen:
        """Until the future is done; the stream has begun before."""
        arrivals: list[float] = []
        answers: list[float] = []
        reading = asyncio.create_task(self._read(arrivals))
        while len(arrivals) < 10:  # noqa: ASYNC110  # the stream's business
            await asyncio.sleep(0.01)
        begin = time.monotonic()
        asking = asyncio.create_task(self._ask(answers))
        await until
        end = time.monotonic()
        for task in (reading, asking):
            task.cancel()
        await asyncio.gather(reading, asking, return_exceptions=True)
        times = [begin, *(at for at in arrivals if begin < at < end), end]
        gap = max(after - before for before, after in itertools.pairwise(times))
        return Seen(gap * 1e3, statistics.quantiles(answers, n=100)[98] * 1e3)

    async def _read(self, arrivals: list[float]) -> None:
        stop = pb.StopConditions(max_tokens=CANARY_TOKENS, ignore_eos=True)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), stop=stop)
        async for _ in self._scheduler.Generate(request):
            arrivals.append(time.monotonic())

    async def _ask(self, answers: list[float]) -> None:
        while True:
            sent = time.monotonic()
            await self._health.Check(health_pb2.HealthCheckRequest())
            answers.append(time.monotonic() - sent)
            await asyncio.sleep(HEALTH_INTERVAL_S)


async def attack(address: str, kind: str, count: int) -> None:
    """All at once, until all have their answer; in the process of the attacker."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.SchedulerServiceStub(channel)
        if kind == "digits":
            requests = [pb.TokenizeRequest(text=DIGITS)] * count
        else:
            chat = pb.Messages(messages=[pb.Message(role="user", content="loop")])
            requests = [pb.TokenizeRequest(messages=chat)] * count
        answers = await asyncio.gather(*map(stub.Tokenize, requests), return_exceptions=True)
    good = sum(not isinstance(answer, BaseException) for answer in answers)
    print(f"    {good} of {count} were tokenized", flush=True)


async def attacker(address: str, kind: str, count: int) -> None:
    """Start one, and wait for its end."""
    arguments = [sys.executable, "-m", "tests.bench.hostile_text", "--attack", kind]
    arguments += ["--address", address, "--attacks", str(count)]
    process = await asyncio.create_subprocess_exec(*arguments)
    await process.wait()


async def measure(address: str, runs: int, attacks: int) -> list[Found]:
    """Print; what was found of each kind of attack."""
    all_found = []
    async with grpc.aio.insecure_channel(address) as channel:
        canary = Canary(channel)
        for kind in ("digits", "templates"):
            alone, beside = [], []
            for _ in range(runs):
                started = time.monotonic()
                beside.append(await canary.watch(asyncio.ensure_future(attacker(address, kind, attacks))))
                took = time.monotonic() - started
                alone.append(
                    await canary.watch(asyncio.ensure_future(asyncio.sleep(min(took, MAX_UNDISTURBED_S))))
                )
                print(
                    f"  {kind}, {took:.1f} s: longest gap {alone[-1].gap_ms:.0f} -> "
                    f"{beside[-1].gap_ms:.0f} ms, health p99 {alone[-1].health_ms:.1f} -> "
                    f"{beside[-1].health_ms:.1f} ms",
                    flush=True,
                )
            gap0, gap = (statistics.median(seen.gap_ms for seen in some) for some in (alone, beside))
            health0, health = (statistics.median(seen.health_ms for seen in some) for some in (alone, beside))
            found = Found(kind, gap, max(MAX_GAP_RATIO * gap0, MAX_GAP_MS), health, MAX_HEALTH_MS)
            all_found.append(found)
            print(
                f"{kind}, medians of {runs}: longest gap {gap:.0f} ms (undisturbed {gap0:.0f}), health p99 "
                f"{health:.1f} ms (undisturbed {health0:.1f}): {'' if found.good else 'NOT '}within bounds"
            )
    return all_found


def main() -> int:
    """Parse, start the services, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--attacks", type=int, default=12, help="at once")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the oracle")
    parser.add_argument("--check", action="store_true", help="end with status 1 beyond the bounds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--attack", choices=("digits", "templates"), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attack:
        uvloop.run(attack(arguments.address, arguments.attack, arguments.attacks))
        return 0
    with (
        tempfile.TemporaryDirectory() as directory,
        doctored_stack(
            Path(directory),
            executor=[
                "--step-ms",
                f"{arguments.step_ms:g}",
                "--context-length",
                "131072",
                "--pages",
                "16384",
            ],
            scheduler=["--log-level", "error", "--tokenizer-cpu-s", "1"],
            chat_template=TEMPLATE,
        ) as stack,
    ):
        all_found = uvloop.run(measure(stack.scheduler.address, arguments.runs, arguments.attacks))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(found) for found in all_found], indent=1) + "\n")
    return 1 if arguments.check and not all(found.good for found in all_found) else 0


if __name__ == "__main__":
    sys.exit(main())
