"""What hostile clients cost the others: every figure beside its bound.

    python -m tests.bench.hostile                      # all scenarios, at most 37 minutes
    python -m tests.bench.hostile --short              # at most 6 minutes
    python -m tests.bench.hostile text auth            # some of them
    python -m tests.bench.hostile overload --seconds 60 --json out.json

    text            twelve tokenizations of 1 MiB and twelve endless templates beside a canary stream
    overload        open-loop load at multiples of the capacity of an oracle with a step time
    overload-model  the same with the default model
    fairness        ten polite callers beside one that floods with 10,000 requests
    auth            a gigabyte of calls without a valid token, to every method of both services
    headers         floods of headers by strangers, at every port
    honest          honest callers with long metadata and thousands of calls, straight and through proxies

Each scenario is a benchmark of its own (`tests.bench.hostile_text`, `overload`, ...), which has
more options and prints more. The exit status is 1 if a figure is beyond its bound. Other load on the
machine shows in every figure: its load average is printed with them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench import hostile_headers
from tests.bench.figures import Line, report
from tests.bench.overload_client import Row
from tests.bench.overload_report import all_lines
from tests.support.checkout import ROOT

INTERRUPT_S = 20.0


@dataclass(frozen=True)
class Scenario:
    """A benchmark with its arguments: in full, and short."""

    module: str
    full: tuple[str, ...]
    short: tuple[str, ...]
    limit_s: float  # in full
    short_limit_s: float
    lines: Callable[[str, Any], Iterator[Line]]


def text_lines(scenario: str, found: Any) -> Iterator[Line]:
    """Of `hostile_text`'s JSON."""
    for one in found:
        yield Line(scenario, f"{one['kind']}: longest gap of a stream, ms", one["gap"], most=one["max_gap"])
        yield Line(scenario, f"{one['kind']}: health p99, ms", one["health"], most=one["max_health"])


def overload_lines(scenario: str, found: Any) -> Iterator[Line]:
    """Of `overload`'s JSON."""
    yield from all_lines(scenario, found["backend"], [Row(**row) for row in found["rows"]])


def fairness_lines(scenario: str, found: Any) -> Iterator[Line]:
    """Of `fairness`'s JSON."""
    for streams in dict.fromkeys(run["streams"] for run in found):
        runs = [run for run in found if run["streams"] == streams]
        name = f"{streams} streams each: p99 beside a flood / among polite ones"
        ratio = statistics.median(run["ratio"] for run in runs)
        yield Line(scenario, name, ratio, most=runs[0]["max_ratio"])


def auth_lines(scenario: str, found: Any) -> Iterator[Line]:
    """Of `hostile_auth`'s JSON."""
    for one in found:
        name = f"{one['service']}: "
        yield Line(scenario, name + f"refused, all of {one['calls']} calls", float(one["refused"]), 1.0)
        yield Line(scenario, name + "rise of memory, MB", one["rise_mb"], most=one["max_rise_mb"])


def headers_lines(scenario: str, found: Any) -> Iterator[Line]:
    """Of `hostile_headers`'s JSON."""
    for one in found:
        name = f"{one['port']}, {one['kind']}, {one['connections']} connections: "
        most = hostile_headers.max_rise(one["connections"])
        yield Line(scenario, name + "rise of memory, MiB", one["rise_mib"], most=most)
        yield Line(scenario, name + "kept, MiB", one["kept_mib"], most=hostile_headers.MAX_KEPT_MIB)
        yield Line(scenario, name + "CPU s a MB", one["cpu_s_per_mb"], most=hostile_headers.MAX_CPU_S_PER_MB)
        yield Line(scenario, name + "canary's gap, ms", one["gap_ms"], most=hostile_headers.MAX_GAP_MS)


def honest_lines(scenario: str, found: Any) -> Iterator[Line]:
    """Of `honest_headers`'s JSON."""
    for one in found:
        name = f"{one['way']}, {one['calls']} calls, {one['metadata_bytes']} bytes: ends without a reason"
        yield Line(scenario, name, float(one["otherwise"]), most=0.0)


SCENARIOS = {
    "text": Scenario("hostile_text", (), ("--runs", "1", "--attacks", "4"), 420, 60, text_lines),
    "overload": Scenario("overload", ("--seconds", "20"), ("--short",), 480, 30, overload_lines),
    "overload-model": Scenario(
        "overload",
        ("--backend", "model", "--deadlines", "5", "--seconds", "20"),
        ("--backend", "model", "--deadlines", "5", "--loads", "1,5", "--seconds", "8"),
        180,
        65,
        overload_lines,
    ),
    "fairness": Scenario(
        "fairness", ("--runs", "3"), ("--runs", "1", "--streams", "1"), 300, 60, fairness_lines
    ),
    "headers": Scenario(
        "hostile_headers",
        ("--settle", "10"),
        ("--connections", "4", "--seconds", "2", "--settle", "2"),
        600,
        100,
        headers_lines,
    ),
    "honest": Scenario("honest_headers", (), ("--calls", "500"), 120, 30, honest_lines),
    "auth": Scenario("hostile_auth", (), ("--gigabytes", "0.1", "--connections", "50"), 120, 25, auth_lines),
}
"""Their limits add up to 37 minutes, and to six."""


def run(name: str, arguments: argparse.Namespace) -> list[Line]:
    """One scenario; a single line that it did not end, if it failed or took too long."""
    scenario = SCENARIOS[name]
    given = list(scenario.short if arguments.short else scenario.full)
    limit_s = scenario.short_limit_s if arguments.short else scenario.limit_s
    if arguments.seconds and scenario.module == "overload":
        given += ["--seconds", f"{arguments.seconds:g}"]
        limit_s *= max(1.0, arguments.seconds / 20)
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        command = [sys.executable, "-m", f"tests.bench.{scenario.module}", *given, "--json", str(result)]
        print(f"\n{name}: {' '.join(command[1:-2])}, load average {os.getloadavg()[0]:.1f}", flush=True)
        began = time.monotonic()
        with subprocess.Popen(command, cwd=ROOT) as process:
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # it ends the services that it has started
                try:
                    process.wait(INTERRUPT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        took = time.monotonic() - began
        if not result.exists():
            return [Line(name, f"ended within {limit_s:.0f} s (after {took:.0f} s)", 0.0, 1.0)]
        print(f"{name}: {took:.0f} s, load average {os.getloadavg()[0]:.1f}", flush=True)
        return list(scenario.lines(name, json.loads(result.read_text())))


def main() -> int:
    """Run them one after the other; print all figures at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)}")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--seconds", type=float, help="of each load of overload, instead of 20 or 10")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if unknown := set(arguments.scenarios) - SCENARIOS.keys():
        parser.error(f"unknown scenario {', '.join(sorted(unknown))}")
    lines = []
    for name in arguments.scenarios or SCENARIOS:
        lines += run(name, arguments)
    print()
    return report(lines, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
