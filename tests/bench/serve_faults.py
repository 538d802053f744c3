"""Services of `paceline serve` die and freeze under 16 streams: is any lost or changed?

usage: python -m tests.bench.serve_faults [--times 50] [--model [--times 5]] [--json FILE]

Each fault (SIGKILL and SIGSTOP, of executor, of scheduler, of both at once) strikes `--times` times, when
each of the 16 streams has had a token and some still run. Clients of the SDK hold the streams, and continue
what is interrupted; what they get is compared with an undisturbed run. A stream may pause for the time to
notice (5 s), the time that the stack took from its start until it served, which is printed, and 5 s more.

`serve` waits longer before each further start of a service that dies again soon, so after
`--faults-per-stack` faults the next ones strike a new stack. Prints a line for each fault, a table, and a
verdict; exit status 1 if a stream failed, changed or paused for longer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paceline import aio
from paceline.channel import Security
from paceline.errors import PacelineError
from paceline.failover import FAILOVER_TIMEOUT_S
from paceline.types import Completion

from tests.model.default_model import default_model
from tests.support.held_streams import HeldStream, held, undisturbed
from tests.support.ports import kept_port
from tests.support.serve import Serve, serving

NOTICE_S, SPARE_S = 5.0, 5.0
EXECUTOR, SCHEDULER = "executor_service", "scheduler_service"
VICTIMS = {"executor": (EXECUTOR,), "scheduler": (SCHEDULER,), "both": (EXECUTOR, SCHEDULER)}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
MAX_MISSES = 20  # tries in a row in which all streams had ended before the fault


@dataclass(frozen=True)
class Workload:
    """What is served, and how much is asked of it."""

    backend: str
    flags: tuple[str, ...]
    tokens: int  # of each completion
    streams: int = 16

    @classmethod
    def of(cls, *, model: bool) -> Workload:
        """The default model, or the oracle."""
        if model:
            return cls("torch", ("--model", str(default_model()), "-E", "dtype=int8"), 60)
        return cls("oracle", ("-E", "step-ms=4"), 300)


@dataclass
class Outcome:
    """Of one kind of fault."""

    victims: str
    fault: str
    times: int = 0
    struck: int = 0  # streams that still ran
    failed: list[str] = field(default_factory=list)
    changed: int = 0  # streams with other tokens, text or logprobs than undisturbed
    max_pause_s: float = 0.0
    allowed_s: float = float("inf")  # of the stack that loaded fastest
    late: int = 0  # faults with a longer pause than allowed

    @property
    def good(self) -> bool:
        """As promised."""
        return not (self.failed or self.changed or self.late)

    def __str__(self) -> str:
        verdict = "held" if self.good else "NOT HELD"
        return (
            f"{self.fault:4s} {self.victims:9s}: {self.times:3d} times, {self.struck:4d} streams struck, "
            f"{len(self.failed)} failed, {self.changed} changed, "
            f"longest pause {self.max_pause_s:5.2f} s (allowed {self.allowed_s:5.2f} s): {verdict}"
        )


@contextmanager
def stack(workload: Workload) -> Iterator[tuple[Serve, float]]:
    """A `serve` of its own, and its load time in seconds."""
    with tempfile.TemporaryDirectory() as directory:
        began = time.monotonic()
        with serving(Path(directory), *workload.flags, backend=workload.backend, port=kept_port()) as serve:
            yield serve, time.monotonic() - began


async def healthy(address: str, end_s: float = 300.0, token: str = "") -> None:
    """Wait until the service takes requests and has its executor."""
    async with asyncio.timeout(end_s), aio.Client(address, security=Security(token=token)) as client:
        while True:
            try:
                if (await client.status(timeout_s=2)).state == "serving":
                    return
            except PacelineError:
                pass
            await asyncio.sleep(0.05)


def judge(
    outcome: Outcome, reads: Sequence[HeldStream], expected: Sequence[list[Completion]], allowed_s: float
) -> float:
    """Add one fault to its kind's outcome; the longest pause of this time."""
    pause_s = max(read.longest_pause_s for read in reads)
    outcome.times += 1
    outcome.max_pause_s = max(outcome.max_pause_s, pause_s)
    outcome.allowed_s = min(outcome.allowed_s, allowed_s)
    outcome.late += pause_s > allowed_s
    for seed, (read, wanted) in enumerate(zip(reads, expected, strict=True)):
        if read.error is not None:
            outcome.failed.append(f"stream {seed}: {read.error}")
            print(f"    FAILED: stream {seed}: {read.error}", flush=True)
        elif read.completions != wanted:
            outcome.changed += 1
            print(f"    CHANGED: stream {seed}", flush=True)
    return pause_s


async def strike(
    serve: Serve, outcome: Outcome, workload: Workload, expected: Sequence[list[Completion]], load_s: float
) -> None:
    """One fault that strikes at least one stream."""
    number = SIGNALS[outcome.fault]
    for _ in range(MAX_MISSES):
        await healthy(serve.address)
        struck_at = 0.0

        def fault() -> None:
            nonlocal struck_at
            struck_at = time.monotonic()
            children = serve.children()
            for name in VICTIMS[outcome.victims]:
                os.kill(children[name], number)

        reads = await held(
            [serve.address],
            fault,
            workload.streams,
            workload.tokens,
            failover_timeout_s=FAILOVER_TIMEOUT_S + load_s,  # whatever loads must have the time to
        )
        struck = sum(not read.ended_before(struck_at) for read in reads)
        if struck:
            outcome.struck += struck
            pause_s = judge(outcome, reads, expected, NOTICE_S + load_s + SPARE_S)
            resumed = sum(read.generation.resumptions > 0 for read in reads)
            print(
                f"  {outcome.fault} {outcome.victims} {outcome.times}: {struck} streams struck, {resumed} "
                f"resumed by their clients, longest pause {pause_s:.2f} s",
                flush=True,
            )
            return
    raise RuntimeError("no stream was ever struck: they end too soon")


async def run(arguments: argparse.Namespace) -> list[Outcome]:
    """All kinds of faults, in turn, so that each new stack sees several kinds."""
    workload = Workload.of(model=arguments.model)
    outcomes = [
        Outcome(victims, fault)
        for fault in arguments.faults.split(",")
        for victims in arguments.victims.split(",")
    ]
    due = [outcome for _ in range(arguments.times) for outcome in outcomes]
    expected: list[list[Completion]] = []
    while due:
        batch, due = due[: arguments.faults_per_stack], due[arguments.faults_per_stack :]
        with stack(workload) as (serve, load_s):
            if not expected:
                expected = await undisturbed([serve.address], workload.streams, workload.tokens)
            print(f"a new stack, which served after {load_s:.2f} s", flush=True)
            try:
                for outcome in batch:
                    await strike(serve, outcome, workload, expected, load_s)
            except BaseException:
                print(serve.log)
                raise
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=0, help="of each fault; default: 50, with --model 5")
    parser.add_argument("--model", action="store_true", help="the default model instead of the oracle")
    parser.add_argument("--faults", default=",".join(SIGNALS))
    parser.add_argument("--victims", default=",".join(VICTIMS))
    parser.add_argument("--faults-per-stack", type=int, default=6)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.times = arguments.times or (5 if arguments.model else 50)
    outcomes = asyncio.run(run(arguments))
    print()
    for outcome in outcomes:
        print(outcome)
    good = all(outcome.good for outcome in outcomes)
    print("all held" if good else "NOT HELD")
    if arguments.json:
        told = [asdict(one) | {"good": one.good} for one in outcomes]
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
