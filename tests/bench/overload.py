"""Goodput under open-loop load: requests a second that end in time, at multiples of the capacity.

    python -m tests.bench.overload --out DIR                    # 1, 2, 5, 10x; 2, 5, 60 s; 60 s each
    python -m tests.bench.overload --backend model --out DIR    # the default model instead of the oracle
    python -m tests.bench.overload --short                      # 1, 5x; 2 s; 10 s each
    python -m tests.bench.overload --address HOST:PORT          # against a running scheduler

All loads (multiples of the capacity) and deadlines take 14 minutes a backend. DIR gets JSON, a table and a
plot (`overload-BACKEND.json`, `.md`, `.svg`). Each load is printed when it is done; at the end each figure
stands beside its bound, and the exit status is 1 if one is beyond it.

Starts an oracle with a modelled step time (or the model) and a scheduler, unless it is given an address. A
process of its own sends requests at Poisson times whatever becomes of them; its CPU time is reported, for a
client that has none left measures itself. Capacity is what closed-loop clients without deadlines get, one for
each seat. Requests are shortened until one that is alone takes at most a quarter of the shortest deadline.
The scheduler is not told how long they will be.

A refusal's latency is from sending to the status. RetryInfo is compared with the time to the first token of
the request that was sent next and served: the wait that was. The first quarter of each load is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import uvloop

from tests.bench.overload_client import Client, Row, quantile, row
from tests.bench.overload_report import all_lines, plot, table
from tests.model.default_model import default_model
from tests.support.checkout import ROOT
from tests.support.stack import oracle_stack

SEATS = {"oracle": 32, "model": 8}


async def measure(arguments: argparse.Namespace) -> None:
    """The client process: lines of JSON, for what is known before, for each load, and for the lengths."""
    async with Client(arguments.address, arguments.length, arguments.spread, arguments.prompt) as client:
        _tell(alone_s=await client.fit_length(min(arguments.deadlines)))
        capacity = arguments.capacity or await client.capacity(arguments.seats, arguments.seconds / 2)
        _tell(capacity=capacity)
        for deadline_s in arguments.deadlines:
            for load in arguments.loads:
                cpu, began = time.process_time(), time.monotonic()
                health: list[float] = []
                asking = asyncio.create_task(client.ask_health(health))
                outcomes = await client.offer(load * capacity, deadline_s, arguments.seconds)
                used = (time.process_time() - cpu) / (time.monotonic() - began)
                asking.cancel()
                _tell(row=asdict(row(outcomes, deadline_s, load, arguments.seconds, health, used)))
        lengths = sorted(map(float, client.lengths))
        _tell(lengths=[quantile(lengths, share) for share in (0.1, 0.5, 0.9)])


def _tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


@dataclass
class Found:
    """What the client process told."""

    alone_s: float = 0.0
    capacity: float = 0.0
    lengths: list[float] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def hear(self, said: dict[str, Any], total: int) -> None:
        """Take one line, and print it."""
        match said:
            case {"alone_s": float(alone_s)}:
                self.alone_s = alone_s
                print(f"alone, a request takes {alone_s:.2f} s", flush=True)
            case {"capacity": float(capacity)}:
                self.capacity = capacity
                print(f"capacity {capacity:.1f} requests/s")
                print(" ".join(f"{one.name:>15s}" for one in fields(Row)), flush=True)
            case {"row": dict(values)}:
                self.rows.append(Row(**values))
                told = " ".join(f"{value:15.2f}" for value in values.values())
                print(f"{told}  ({len(self.rows)} of {total})", flush=True)
            case {"lengths": list(lengths)}:
                self.lengths = lengths
                print("output tokens, 10, 50, 90 %: {:.0f} {:.0f} {:.0f}".format(*lengths))

    def head(self, backend: str) -> str:
        """One line for the table and the plot."""
        lengths = "{:.0f}, {:.0f}, {:.0f}".format(*self.lengths)
        return (
            f"{backend}: capacity {self.capacity:.1f} requests/s; output tokens {lengths} (10, 50, 90 %); "
            f"alone {self.alone_s:.2f} s"
        )


def report(arguments: argparse.Namespace, address: str) -> bool:
    """Run the client process, print what it tells, write the files; whether all bounds are held."""
    command = [sys.executable, "-m", "tests.bench.overload", "--client", "--address", address]
    for name in ("seconds", "length", "spread", "prompt", "seats", "capacity"):
        command += [f"--{name}", str(getattr(arguments, name))]
    for name in ("loads", "deadlines"):
        command += [f"--{name}", ",".join(map(str, getattr(arguments, name)))]
    found, total = Found(), len(arguments.loads) * len(arguments.deadlines)
    with subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        for line in client.stdout:
            found.hear(json.loads(line), total)
    if client.returncode:
        raise SystemExit(f"the client failed with status {client.returncode}")
    backend, rows = arguments.backend, found.rows
    lines = list(all_lines(f"overload-{backend}", backend, rows))
    print(*lines, sep="\n")
    result = json.dumps({"backend": backend} | asdict(found), indent=1) + "\n"
    if arguments.json:
        arguments.json.write_text(result)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        stem = arguments.out / f"overload-{backend}"
        stem.with_suffix(".json").write_text(result)
        stem.with_suffix(".md").write_text(table(backend, rows, found.head(backend)))
        plot(rows, found.capacity, found.head(backend), stem.with_suffix(".svg"))
    return all(line.good for line in lines)


def _floats(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def main() -> int:
    """Parse; start what is needed; measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", choices=SEATS, default="oracle")
    parser.add_argument("--loads", type=_floats, default=[1, 2, 5, 10], help="multiples of the capacity")
    parser.add_argument("--deadlines", type=_floats, default=[2, 5, 60], help="seconds")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--length", type=int, default=20, help="median of the output tokens, at most")
    parser.add_argument("--spread", type=float, default=0.2, help="sigma of their logarithm")
    parser.add_argument("--prompt", type=int, default=16, help="tokens")
    parser.add_argument("--seats", type=int, default=0, help="sequences that run at once; 0: 32, model 8")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the oracle")
    parser.add_argument("--token-us", type=float, default=200.0, help="of the oracle")
    parser.add_argument("--capacity", type=float, default=0.0, help="requests/s; 0: measure it")
    parser.add_argument("--address", default="", help="of a running scheduler")
    parser.add_argument("--json", type=Path, help="a file")
    parser.add_argument("--out", type=Path, help="a directory for JSON, table and plot")
    parser.add_argument("--short", action="store_true", help="1 and 5x, 2 s, 10 s each")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.seats = arguments.seats or SEATS[arguments.backend]
    if arguments.short:
        arguments.loads, arguments.deadlines, arguments.seconds = [1, 5], [2], 10.0
    if arguments.client:
        uvloop.run(measure(arguments))
        return 0
    with ExitStack() as stack:
        address = arguments.address
        if not address:
            executor = ["--pages", "8192", "--step-ms", str(arguments.step_ms)]
            executor += ["--token-us", str(arguments.token_us)]
            if arguments.backend == "model":
                executor = ["--backend", "torch", "--model", str(default_model()), "--dtype", "float32"]
            scheduler = ["--max-running", str(arguments.seats), "--log-level", "warning"]
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            services = oracle_stack(Path(directory), executor=executor, scheduler=scheduler)
            address = stack.enter_context(services).scheduler.address
        return 0 if report(arguments, address) else 1


if __name__ == "__main__":
    sys.exit(main())
