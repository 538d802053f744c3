"""What floods of headers by strangers cost, at every port of ours that speaks HTTP/2.

usage: python -m tests.bench.hostile_headers [--connections 4,12] [--seconds 5] [--settle 30] [--json FILE]
       [--ports scheduler,health,executor] [--kinds references,literals,...]

The services demand a token, which the attackers don't have. For each port and each kind of
`tests.bench.header_flood`: the attacker and a canary, who asks for the health of the server 50 times a second
on one connection, are processes of their own. Prints the service's memory before, at its highest and
`--settle` seconds after the last connection closed, its CPU time for each megabyte sent, and the canary's
longest gap. Fails beyond 150 MiB with 4 connections, 300 with 12 and 1,500 with more, 50 MiB that stay, 0.3 s
of CPU for a megabyte, a gap of 500 ms, or if the canary got an error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.bench.header_flood import KINDS
from tests.support.checkout import ROOT
from tests.support.processes import ServiceProcess
from tests.support.stack import Stack

MAX_RISE_MIB = {4: 150.0, 12: 300.0, 4096: 1500.0}  # by the most connections
MAX_KEPT_MIB = 50
MAX_CPU_S_PER_MB = 0.3
MAX_GAP_MS = 500
_EVERY_S = 0.02
_MOST_MB = 64.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Flood:
    """What one flood cost."""

    port: str
    kind: str
    connections: int
    sent_mb: float
    ended: int  # connections that the service ended
    before_mib: float
    rise_mib: float
    kept_mib: float
    cpu_s_per_mb: float
    gap_ms: float
    failed: int  # canary's calls


def canary(address: str, seconds: float) -> None:
    """Ask for the health of `address`; print the longest time of a call, in ms, and how many failed."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        until, longest, failed = time.monotonic() + seconds, 0.0, 0
        while time.monotonic() < until:
            began = time.monotonic()
            try:
                stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
            except grpc.RpcError:
                failed += 1
            longest = max(longest, time.monotonic() - began)
            time.sleep(_EVERY_S)
    print(json.dumps([1000 * longest, failed]))


def memory_mib(pid: int) -> float:
    """A process's resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def cpu_s(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def flood(
    process: ServiceProcess,
    port: str,
    address: str,
    kind: str,
    connections: int,
    seconds: float,
    settle: float,
) -> Flood:
    """Flood one port, and wait until the memory has had time to go back."""
    pid, before, used = process.pid, memory_mib(process.pid), cpu_s(process.pid)
    highest, over = before, threading.Event()

    def look() -> None:
        nonlocal highest
        while not over.wait(_EVERY_S):
            highest = max(highest, memory_mib(pid))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        bird = [sys.executable, "-m", "tests.bench.hostile_headers", "--canary", address]
        command = [sys.executable, "-m", "tests.bench.header_flood", kind, address, "--mb", str(_MOST_MB)]
        command += ["--connections", str(connections), "--seconds", str(seconds)]
        with subprocess.Popen(
            [*bird, "--seconds", str(seconds + 2)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as watching:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            gap_ms, failed = json.loads(watching.communicate()[0])
        spent = cpu_s(pid) - used
        time.sleep(settle)
    finally:
        over.set()
        looking.join()
    sent = json.loads(done.stdout)
    return Flood(
        port,
        kind,
        connections,
        sent["sent_mb"],
        sent["ended"],
        before,
        highest - before,
        memory_mib(pid) - before,
        spent / max(sent["sent_mb"], 1.0),
        gap_ms,
        failed,
    )


def floods(
    counts: Sequence[int], seconds: float, settle: float, chosen: Sequence[str], kinds: Sequence[str]
) -> list[Flood]:
    """Of the scheduler's port, its health port and an executor's."""
    found = []
    with tempfile.TemporaryDirectory() as directory:
        (token := Path(directory) / "token").write_text("a-token-that-no-stranger-knows\n")
        token.chmod(0o600)
        stack, demand = Stack(Path(directory)), ("--auth-token-file", str(token))
        try:
            executor = stack.start_executor(*demand)
            stack.start_scheduler(*demand, "--executor-token-file", str(token), "--health-port", "0")
            scheduler = stack.scheduler
            scheduler.wait_serving()
            ports = [
                (scheduler, "scheduler", scheduler.address),
                (scheduler, "health", health_address(scheduler)),
                (stack.executor(executor), "executor", executor),
            ]
            for process, port, address in ports:
                for kind in kinds if port in chosen else ():
                    for connections in counts:
                        one = flood(process, port, address, kind, connections, seconds, settle)
                        print(
                            f"{port:9} {kind:12} {connections:3} connections: {one.sent_mb:5.1f} MB sent,"
                            f" {one.ended:3} ended, {one.before_mib:4.0f} MiB {one.rise_mib:+5.0f}, later"
                            f" {one.kept_mib:+4.0f}; {one.cpu_s_per_mb:.2f} s of CPU a MB; canary's gap"
                            f" {one.gap_ms:4.0f} ms, {one.failed} failed",
                            flush=True,
                        )
                        found.append(one)
        finally:
            stack.kill()
    return found


def health_address(process: ServiceProcess) -> str:
    """Where a service's health port is, by its log."""
    [line] = [line for line in process.log.splitlines() if '"health checks"' in line]
    return f"127.0.0.1:{json.loads(line)['port']}"


def main() -> int:
    """Measure, print, and compare with the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--connections", default="4,12")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--settle", type=float, default=30.0)
    parser.add_argument("--ports", default="scheduler,health,executor")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--canary", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.canary:
        canary(arguments.canary, arguments.seconds)
        return 0
    counts = [int(count) for count in arguments.connections.split(",")]
    ports, kinds = arguments.ports.split(","), arguments.kinds.split(",")
    found = floods(counts, arguments.seconds, arguments.settle, ports, kinds)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in found]))
    return int(any(beyond(one) for one in found))


def max_rise(connections: int) -> float:
    """MiB by which the memory may rise."""
    return next(rise for most, rise in MAX_RISE_MIB.items() if connections <= most)


def beyond(one: Flood) -> bool:
    """Whether a figure is beyond its bound."""
    return (
        one.rise_mib > max_rise(one.connections)
        or one.kept_mib > MAX_KEPT_MIB
        or one.cpu_s_per_mb > MAX_CPU_S_PER_MB
        or one.gap_ms > MAX_GAP_MS
        or one.failed > 0
    )


if __name__ == "__main__":
    sys.exit(main())
