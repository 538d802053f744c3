"""Goodput under open-loop load: requests a second that end in time, at multiples of the capacity.

    python -m tests.bench.overload                          # 1, 2, 5, 10x; deadlines 2, 5, 60 s; 60 s each
    python -m tests.bench.overload --short                  # 1, 5x; 2 s; 10 s each
    python -m tests.bench.overload --torch --seats 8        # the default model instead of the oracle
    python -m tests.bench.overload --address HOST:PORT      # against a running scheduler
    python -m tests.bench.overload --json out.json --png out.png

Starts an oracle with a modelled step time and a scheduler, unless it is given an address. A process of its
own sends requests at Poisson times whatever becomes of them; its CPU time is reported, for a client that has
none left measures itself. Capacity is what closed-loop clients without deadlines get, one for each seat.

A refusal's latency is from sending to the status. RetryInfo is compared with the time to the first token of
the request that was sent next and served: the wait that was. The first quarter of each load is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvloop
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

from tests.model.default_model import default_model
from tests.support.processes import ROOT
from tests.support.stack import oracle_stack

WARM_UP = 0.25
"""Of each load's time."""
HEALTH_INTERVAL_S = 0.02


@dataclass
class Outcome:
    """One request; times in seconds since the load began, or since it was sent."""

    sent_at: float
    code: str
    took_s: float
    first_token_s: float | None = None
    retry_s: float | None = None


@dataclass
class Row:
    """One load at one deadline; rates a second, times in ms."""

    deadline_s: float
    load: float
    offered: float
    goodput: float
    refused: float
    late: float  # ended DEADLINE_EXCEEDED
    in_vain: float  # of these, had tokens
    first_token_p50: float
    first_token_p99: float
    refusal_p50: float
    refusal_p99: float
    retry_ratio: float  # median of RetryInfo / the wait that was
    health_p99: float
    client_cpu: float  # of one core


class Client:
    """Sends requests of about `length` output tokens."""

    def __init__(self, address: str, length: int, spread: float, prompt: int, seed: int = 1) -> None:
        self._address, self._length, self._spread, self._prompt = address, length, spread, prompt
        self._random = random.Random(seed)
        self._stub: Any  # of asyncio
        self.lengths: list[int] = []

    async def __aenter__(self) -> Client:
        self._channel = grpc.aio.insecure_channel(self._address)
        self._stub = SchedulerServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._vocabulary = min(256, (await self._stub.GetModelInfo(pb.GetModelInfoRequest())).vocab_size)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def call(self, began: float, timeout_s: float | None) -> Outcome:
        """One request to its end."""
        rng = self._random
        length = max(1, round(self._length * rng.lognormvariate(0, self._spread)))
        self.lengths.append(length)
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[rng.randrange(self._vocabulary) for _ in range(self._prompt)]),
            stop=pb.StopConditions(max_tokens=length, ignore_eos=True),
            speculation=pb.Speculation(mode=pb.SPECULATION_MODE_OFF),
        )
        sent = time.monotonic()
        first: float | None = None
        call = self._stub.Generate(request, timeout=timeout_s)
        try:
            async for _ in call:
                first = first or time.monotonic() - sent
        except grpc.aio.AioRpcError as error:
            retry = await _retry_s(call)
            return Outcome(sent - began, error.code().name, time.monotonic() - sent, first, retry)
        return Outcome(sent - began, "OK", time.monotonic() - sent, first)

    async def capacity(self, clients: int, seconds: float) -> float:
        """Requests a second that so many closed-loop clients get."""
        began, done = time.monotonic(), 0

        async def loop() -> None:
            nonlocal done
            while time.monotonic() - began < seconds:
                outcome = await self.call(began, None)
                done += outcome.code == "OK" and seconds / 4 < time.monotonic() - began < seconds

        await asyncio.gather(*(loop() for _ in range(clients)))
        return done / (seconds * 0.75)

    async def ask_health(self, answers: list[float]) -> None:
        """Every 20 ms, until cancelled; how long each answer took, in seconds."""
        while True:
            sent = time.monotonic()
            await self._health.Check(health_pb2.HealthCheckRequest())
            answers.append(time.monotonic() - sent)
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def offer(self, rate: float, timeout_s: float, seconds: float) -> list[Outcome]:
        """So many requests a second for so long, and how all of them ended."""
        began, calls = time.monotonic(), []
        due = began
        while (due := due + self._random.expovariate(rate)) < began + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            calls.append(asyncio.create_task(self.call(began, timeout_s)))
        return list(await asyncio.gather(*calls))


async def _retry_s(call: grpc.aio.UnaryStreamCall[Any, Any]) -> float | None:
    status = await rpc_status.aio.from_call(call)
    for detail in status.details if status else ():
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            return float(retry.retry_delay.ToTimedelta().total_seconds())
    return None


def row(
    outcomes: list[Outcome],
    deadline_s: float,
    load: float,
    seconds: float,
    health: list[float],
    cpu: float,
) -> Row:
    """What the counted ones say. Goodput is by when requests ended, the rest by when they were sent."""
    start = WARM_UP * seconds
    span = seconds - start
    counted = [o for o in outcomes if o.sent_at >= start]
    good = [o for o in outcomes if o.code == "OK" and start <= o.sent_at + o.took_s < seconds]
    refused = [o for o in counted if o.code == "RESOURCE_EXHAUSTED"]
    late = [o for o in counted if o.code == "DEADLINE_EXCEEDED"]
    served = sorted((o.sent_at, o.first_token_s) for o in outcomes if o.first_token_s is not None)
    firsts = [o.first_token_s for o in counted if o.first_token_s is not None]
    ratios = []
    for one in refused:
        at = bisect_left(served, (one.sent_at, 0.0))
        if one.retry_s is not None and at < len(served):
            ratios.append(one.retry_s / served[at][1])
    return Row(
        deadline_s=deadline_s,
        load=load,
        offered=len(counted) / span,
        goodput=len(good) / span,
        refused=len(refused) / span,
        late=len(late) / span,
        in_vain=sum(o.first_token_s is not None for o in late) / span,
        first_token_p50=_quantile(firsts, 0.5) * 1e3,
        first_token_p99=_quantile(firsts, 0.99) * 1e3,
        refusal_p50=_quantile([o.took_s for o in refused], 0.5) * 1e3,
        refusal_p99=_quantile([o.took_s for o in refused], 0.99) * 1e3,
        retry_ratio=statistics.median(ratios) if ratios else 0.0,
        health_p99=_quantile(health, 0.99) * 1e3,
        client_cpu=cpu,
    )


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


async def measure(arguments: argparse.Namespace) -> None:
    """The client process: one line of JSON for the capacity, then one for each load."""
    async with Client(arguments.address, arguments.length, arguments.spread, arguments.prompt) as client:
        capacity = arguments.capacity or await client.capacity(arguments.seats, arguments.seconds / 2)
        print(json.dumps({"capacity": capacity}), flush=True)
        for deadline_s in arguments.deadlines:
            for load in arguments.loads:
                cpu, began = time.process_time(), time.monotonic()
                health: list[float] = []
                asking = asyncio.create_task(client.ask_health(health))
                outcomes = await client.offer(load * capacity, deadline_s, arguments.seconds)
                used = (time.process_time() - cpu) / (time.monotonic() - began)
                asking.cancel()
                result = row(outcomes, deadline_s, load, arguments.seconds, health, used)
                print(json.dumps(asdict(result)), flush=True)
        lengths = sorted(client.lengths)
        print(json.dumps({"lengths": [_quantile([*map(float, lengths)], q) for q in (0.1, 0.5, 0.9)]}))


def plot(rows: list[Row], capacity: float, path: Path) -> None:
    """Goodput by load, one line a deadline."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for deadline_s in dict.fromkeys(r.deadline_s for r in rows):
        line = [r for r in rows if r.deadline_s == deadline_s]
        axes.plot([r.load for r in line], [r.goodput for r in line], "o-", label=f"deadline {deadline_s:g} s")
    axes.axhline(capacity, color="gray", linestyle=":", label="capacity without deadlines")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("offered load / capacity")
    axes.set_ylabel("requests done in time, per second")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def report(arguments: argparse.Namespace, address: str) -> None:
    """Run the client process against the scheduler, print its rows as they come, and write the files."""
    command = [sys.executable, "-m", "tests.bench.overload", "--client", "--address", address]
    for name in ("seconds", "length", "spread", "prompt", "seats", "capacity"):
        command += [f"--{name}", str(getattr(arguments, name))]
    for name in ("loads", "deadlines"):
        command += [f"--{name}", ",".join(map(str, getattr(arguments, name)))]
    names = [field.name for field in fields(Row)]
    rows: list[Row] = []
    capacity = 0.0
    with subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        for line in client.stdout:
            said = json.loads(line)
            if "capacity" in said:
                capacity = said["capacity"]
                print(f"capacity {capacity:.1f} requests/s")
                print(" ".join(f"{name:>15s}" for name in names))
            elif "lengths" in said:
                print("output tokens, 10, 50, 90 %: {:.0f} {:.0f} {:.0f}".format(*said["lengths"]))
            else:
                rows.append(Row(**said))
                print(" ".join(f"{value:15.2f}" for value in said.values()), flush=True)
    if client.returncode:
        raise SystemExit(f"the client failed with status {client.returncode}")
    for deadline_s in arguments.deadlines:
        best = max(r.goodput for r in rows if r.deadline_s == deadline_s)
        shares = [f"{r.load:g}x {r.goodput / best:.2f}" for r in rows if r.deadline_s == deadline_s]
        print(f"deadline {deadline_s:g} s, goodput / best: " + ", ".join(shares))
    if arguments.json:
        result = {"capacity": capacity, "rows": [asdict(r) for r in rows]}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.png:
        plot(rows, capacity, arguments.png)


def _floats(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def main() -> None:
    """Parse; start what is needed; measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--loads", type=_floats, default=[1, 2, 5, 10], help="multiples of the capacity")
    parser.add_argument("--deadlines", type=_floats, default=[2, 5, 60], help="seconds")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--length", type=int, default=20, help="median of the output tokens")
    parser.add_argument("--spread", type=float, default=0.2, help="sigma of their logarithm")
    parser.add_argument("--prompt", type=int, default=16, help="tokens")
    parser.add_argument("--seats", type=int, default=32, help="sequences that run at once")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the oracle")
    parser.add_argument("--token-us", type=float, default=200.0, help="of the oracle")
    parser.add_argument("--torch", action="store_true", help="the default model")
    parser.add_argument("--capacity", type=float, default=0.0, help="requests/s; 0: measure it")
    parser.add_argument("--address", default="", help="of a running scheduler")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--short", action="store_true", help="1 and 5x, 2 s, 10 s each")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.short:
        arguments.loads, arguments.deadlines, arguments.seconds = [1, 5], [2], 10.0
    if arguments.client:
        uvloop.run(measure(arguments))
        return
    with ExitStack() as stack:
        address = arguments.address
        if not address:
            executor = ["--pages", "8192", "--step-ms", str(arguments.step_ms)]
            executor += ["--token-us", str(arguments.token_us)]
            if arguments.torch:
                executor = ["--backend", "torch", "--model", str(default_model()), "--dtype", "float32"]
            scheduler = ["--max-running", str(arguments.seats), "--log-level", "warning"]
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            services = oracle_stack(Path(directory), executor=executor, scheduler=scheduler)
            address = stack.enter_context(services).scheduler.address
        report(arguments, address)


if __name__ == "__main__":
    main()
