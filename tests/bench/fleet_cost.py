"""What a fleet of one stack costs beside `paceline serve`, and what its Ray takes while nothing is asked.

usage: python -m tests.bench.fleet_cost [--pairs 10] [--streams 8] [--new 128] [--idle-s 30]

Both serve an oracle with steps of 20 ms on this machine, and are asked in turn: tokens per second and the
first token of streams that begin at once. Ratios are of pairs. Needs the extra ray.
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
from contextlib import suppress
from pathlib import Path

import yaml
from paceline import aio
from paceline.channel import Security

from tests.bench.figures import Line, report
from tests.support.checkout import environment
from tests.support.memory import own_bytes
from tests.support.serve import serving

STEP_MS, PROMPT = 20, 16


async def streams(client: aio.Client, count: int, new: int) -> tuple[float, float]:
    """Tokens per second of all, and the median of the seconds to their first tokens."""
    firsts: list[float] = []
    began = time.monotonic()

    async def one(number: int) -> None:
        ids = [number] * PROMPT
        async with client.generate(token_ids=ids, max_tokens=new, ignore_eos=True) as stream:
            async for event in stream:
                if getattr(event, "token_ids", ()):
                    firsts.append(time.monotonic() - began)
                    break
            await stream.collect()

    await asyncio.gather(*map(one, range(count)))
    return count * new / (time.monotonic() - began), statistics.median(firsts)


def of_ray() -> list[int]:
    """Ray's processes on this machine, without what its actors have started."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            words = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if words.startswith("ray::") or "/ray/" in words:
            found.append(int(directory.name))
    return found


def cpu_s(pids: list[int]) -> float:
    """Seconds of CPU time that they have taken."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def pairs(
    fleet_address: str, token: str, serve_address: str, options: argparse.Namespace
) -> list[Line]:
    """Both in turn, in alternating order."""
    rates, firsts = [], []
    async with (
        aio.Client(fleet_address, security=Security(token=token)) as by_fleet,
        aio.Client(serve_address) as by_serve,
    ):
        for pair in range(options.pairs + 1):
            turns = [by_fleet, by_serve] if pair % 2 else [by_serve, by_fleet]
            found = {one: await streams(one, options.streams, options.new) for one in turns}
            if pair:  # the first one warms
                rates.append(found[by_serve][0] / found[by_fleet][0])
                firsts.append(found[by_fleet][1] / found[by_serve][1])
    return [
        Line("fleet", "slowdown of tokens/s, upper end of 95 %", upper_end(rates), most=1.05),
        Line("fleet", "slowdown of first token, upper end of 95 %", upper_end(firsts), most=1.05),
    ]


def idle(seconds: float) -> list[Line]:
    """What Ray takes meanwhile."""
    pids = of_ray()
    before = cpu_s(pids)
    time.sleep(seconds)
    return [
        Line("ray", "idle, share of a core", (cpu_s(pids) - before) / seconds),
        Line("ray", "memory (PSS), MB", sum(map(own_bytes, pids)) / 1e6),
    ]


def measure(options: argparse.Namespace) -> list[Line]:
    with tempfile.TemporaryDirectory(prefix="plr-") as short, tempfile.TemporaryDirectory() as plain:
        home, spec = Path(short, "home"), Path(short, "spec.yaml")
        model = {"name": "oracle", "backend": "oracle", "executor": {"step-ms": STEP_MS}, "replicas": 1}
        spec.write_text(yaml.safe_dump({"fleet": "cost", "home": str(home), "models": [model]}))
        fleet("up", spec)
        try:
            [stack] = json.loads(fleet("status", spec, "--json"))["stacks"]
            token = (home / "client-token").read_text().strip()
            with serving(Path(plain), "-E", f"step-ms={STEP_MS}") as serve:
                lines = asyncio.run(pairs(stack["address"], token, serve.address, options))
            return lines + idle(options.idle_s)
        finally:
            fleet("down", spec)


def fleet(command: str, spec: Path, *arguments: str) -> str:
    """What `paceline fleet` prints; raises CalledProcessError."""
    words = [sys.executable, "-m", "paceline", "fleet", command, str(spec), *arguments]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=environment()).stdout


def upper_end(ratios: list[float]) -> float:
    """Of the mean's interval, by the ratios' spread."""
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5
    print(f"pairs: {' '.join(f'{one:.3f}' for one in ratios)}")
    return statistics.mean(ratios) + 1.96 * spread


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--idle-s", type=float, default=30.0)
    return report(measure(parser.parse_args()), None)


if __name__ == "__main__":
    raise SystemExit(main())
