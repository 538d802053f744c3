"""What attacks on the OpenAI API cost the others: memory of door and scheduler, gaps of a canary's stream.

usage: python -m tests.bench.door_hostile [--short] [--only WORD] [--json FILE]

One oracle (steps of 10 ms) with tokens, one door. A canary streams through it all the time, in a process
of its own; each attack of `tests.bench.door_attacks` runs beside it. Fails beyond 100 MB more in the door,
20 MiB in the scheduler, a gap of 500 ms, and for an answer of status 500 or a failure of the canary. The
attackers' own load is in the gap.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from service_kit.identity import token_hash

from tests.bench.door_attacks import ATTACKS, Target, malformed
from tests.bench.figures import Line, report
from tests.support.checkout import ROOT
from tests.support.processes import ServiceProcess
from tests.support.stack import oracle_stack

MOST_DOOR_MB, MOST_SCHEDULER_MB, MOST_GAP_MS = 100.0, 20 * 1.048576, 500.0
KEYS = {name: name * 10 for name in ("attacker", "canary", "root")}
_WARM_UP_S = 2.0


async def canary(port: int, file: Path) -> None:
    """Stream until the process is ended; each event's time, or an end that is none, to `file`."""
    body = b'{"prompt": "x", "max_tokens": 1000, "ignore_eos": true, "stream": true}'
    head = Target(port, KEYS["canary"]).head("/v1/completions", content_length=str(len(body))) + b"\r\n"
    with file.open("w", buffering=1) as out:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + body)
            ended = False
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    out.write(f"{time.monotonic()}\n")
                    ended = b"[DONE]" in line
                    if ended:
                        break
            writer.close()
            if not ended:
                out.write("failed\n")
                await asyncio.sleep(0.1)


class Memory:
    """The highest resident memory of processes, in MB, by name."""

    def __init__(self, **pids: int) -> None:
        self._pids = pids
        self.highest = dict.fromkeys(pids, 0.0)
        threading.Thread(target=self._watch, daemon=True).start()

    def now(self, name: str) -> float:
        """Of one process."""
        return (
            int(Path(f"/proc/{self._pids[name]}/statm").read_text().split()[1])
            * os.sysconf("SC_PAGESIZE")
            / 1e6
        )

    def _watch(self) -> None:
        with suppress(OSError):
            while True:
                for name in self._pids:
                    self.highest[name] = max(self.highest[name], self.now(name))
                time.sleep(0.005)


@contextmanager
def attacked(directory: Path) -> Iterator[tuple[Target, dict[str, int], ServiceProcess]]:
    """A door with a stack; the target, the pids by name, the door's process."""
    tokens = directory / "tokens.yaml"
    admin = {"root": ", admin: true"}
    tokens.write_text(
        "".join(f"- {{name: {n}, sha256: {token_hash(k)}{admin.get(n, '')}}}\n" for n, k in KEYS.items())
    )
    with oracle_stack(
        directory / "stack", executor=("--step-ms", "10"), scheduler=("--tokens-file", str(tokens))
    ) as stack:
        flags = ["--scheduler", stack.scheduler.address, "--host", "127.0.0.1"]
        door = ServiceProcess("paceline_openai", flags, directory / "door")
        try:
            yield (
                Target(door.port, KEYS["attacker"]),
                {"door": door.pid, "scheduler": stack.scheduler.pid},
                door,
            )
        finally:
            door.kill()


def run(*, short: bool, only: str = "") -> list[Line]:
    """All attacks, one after the other; the figures."""
    lines = []
    with tempfile.TemporaryDirectory() as name, attacked(Path(name)) as (target, pids, door):
        times = Path(name) / "canary"
        command = [sys.executable, "-m", "tests.bench.door_hostile", "--canary", f"{target.port}:{times}"]
        streaming = subprocess.Popen(command, cwd=ROOT)
        try:
            while not times.exists() or times.stat().st_size < 1000:
                time.sleep(0.05)
            warm = Target(target.port, target.key)
            asyncio.run(malformed(warm, 100))
            time.sleep(0.5 if short else _WARM_UP_S)
            memory = Memory(**pids)
            before = {one: memory.now(one) for one in pids}
            for title, (attack, full, few) in ATTACKS.items():
                if only in title:
                    lines.append(_gap(title, times, attack(target, few if short else full)))
                    shown = ", ".join(f"{one} {memory.highest[one] - before[one]:.0f}" for one in pids)
                    print(f"    highest memory so far, MB more: {shown}", flush=True)
            rise = {one: memory.highest[one] - before[one] for one in pids}
            failed = times.read_text().count("failed")
        finally:
            streaming.kill()
            streaming.wait()
        request = urllib.request.Request(f"http://127.0.0.1:{target.port}/metrics")
        request.add_header("authorization", f"Bearer {KEYS['root']}")
        shown = urllib.request.urlopen(request, timeout=30).read().decode().split("\n")
        broken = [
            line for line in shown if line.startswith("paceline_gateway_requests_total") and '"500"' in line
        ]
        print(*broken, *[line for line in door.log.split("\n") if "ERROR" in line][:5], sep="\n")
        print("answers:", dict(sorted(target.statuses.items())))
    return [
        *lines,
        Line("door", "door's memory, MB more", rise["door"], most=MOST_DOOR_MB),
        Line("door", "scheduler's memory, MB more", rise["scheduler"], most=MOST_SCHEDULER_MB),
        Line("door", "answers of status 500", float(len(broken)), most=0.0),
        Line("door", "streams of the canary that failed", float(failed), most=0.0),
    ]


def _gap(title: str, times: Path, attack: Coroutine[Any, Any, None]) -> Line:
    """Run an attack; the longest gap of the canary's events meanwhile."""
    began = time.monotonic()
    asyncio.run(attack)
    time.sleep(0.3)
    seen = [float(one) for one in times.read_text().split("\n")[:-1] if one != "failed"]
    during = [one for one in seen if one >= began]
    gap = max((later - earlier for earlier, later in pairwise(during)), default=time.monotonic() - began)
    print(f"{title}: {time.monotonic() - began:.1f} s, longest gap {1000 * gap:.0f} ms", flush=True)
    return Line("door", f"{title}: gap, ms", 1000 * gap, most=MOST_GAP_MS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, and run."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--short", action="store_true", help="in 15 s")
    parser.add_argument("--only", default="", help="attacks with this in their name")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--canary", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.canary:
        port, _, file = given.canary.partition(":")
        asyncio.run(canary(int(port), Path(file)))
    print(f"load average {os.getloadavg()[0]:.1f}")
    return report(run(short=given.short, only=given.only), given.json)


if __name__ == "__main__":
    sys.exit(main())
