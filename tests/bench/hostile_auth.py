"""What strangers cost: a gigabyte of calls without a valid token, to every method of both services.

usage: python -m tests.bench.hostile_auth [--gigabytes 1] [--connections 200] [--json FILE]

Each call sends a message of 60 MB (15 MB to the scheduler, whose limit is 16) with no token or a wrong one;
health watches stay open with their message unread. Prints each service's resident memory before, at its
highest and after, and fails if it rose by more than 50 MB or a call was answered otherwise than refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from paceline.executor.v1 import executor_pb2
from paceline.scheduler.v1 import admin_pb2, scheduler_pb2

from tests.support.processes import ServiceProcess
from tests.support.stack import Stack

_HEALTH = "/grpc.health.v1.Health/"
_FOREIGN = [
    *(_HEALTH + name for name in ("Check", "List")),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/no.such.Service/Method",
]
_CREDENTIALS: list[Any] = [(), (("authorization", "Bearer wrong"),)]
_AT_ONCE = 6
_LIMIT_MB = 50
_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


def methods(*modules: Any) -> list[str]:
    """All of some services' methods, and those that every service of ours has."""
    services = [one for module in modules for one in module.DESCRIPTOR.services_by_name.values()]
    return [f"/{one.full_name}/{method.name}" for one in services for method in one.methods] + _FOREIGN


def resident_mb(process: ServiceProcess) -> float:
    """Of one process, now."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096 / 1e6


async def refusals(
    process: ServiceProcess, calls: Iterator[tuple[str, Any]], body: bytes, channels: list[Any]
) -> tuple[Counter[str], float]:
    """Send all calls, a few at once; how they ended, and the highest memory seen."""
    ends: Counter[str] = Counter()
    highest, done = resident_mb(process), False

    async def watch() -> None:
        nonlocal highest
        while not done:
            highest = max(highest, resident_mb(process))
            await asyncio.sleep(0.01)

    async def send(worker: int) -> None:
        for number, (method, metadata) in enumerate(calls):
            channel = channels[(worker + number * _AT_ONCE) % len(channels)]
            call = channel.unary_unary(method)(body, metadata=metadata, timeout=60)
            code = await call.code()
            ends[f"{'Health/Check' if method.endswith('Check') else 'other'} {code.name}"] += 1

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(send(worker) for worker in range(_AT_ONCE)))
    done = True
    await watching
    return ends, highest


async def unread_watches(process: ServiceProcess, body: bytes, channels: list[Any]) -> float:
    """Memory while many health watches are open whose messages nobody reads."""
    watches = [one.unary_stream(_HEALTH + "Watch")(body, timeout=120) for one in channels for _ in range(3)]
    highest = 0.0
    for _ in range(50):
        await asyncio.sleep(0.1)
        highest = max(highest, resident_mb(process))
    for watch in watches:
        watch.cancel()
    return highest


@dataclass(frozen=True)
class Held:
    """How one service held."""

    service: str
    calls: int
    refused: bool  # all of them
    rise_mb: float
    max_rise_mb: float

    @property
    def good(self) -> bool:
        """All refused, and the memory flat."""
        return self.refused and self.rise_mb <= self.max_rise_mb


async def attack(name: str, process: ServiceProcess, names: list[str], body: bytes, args: Any) -> Held:
    """One service's turn."""
    count = max(int(args.gigabytes * 1e9 / len(body)), 2 * len(names))
    calls = iter([(names[i // 2 % len(names)], _CREDENTIALS[i % 2]) for i in range(count)])
    channels = [grpc.aio.insecure_channel(process.address, _OPTIONS) for _ in range(args.connections)]
    try:
        await asyncio.gather(*(one.channel_ready() for one in channels))
        before = resident_mb(process)
        ends, highest = await refusals(process, calls, body, channels)
        watched = await unread_watches(process, body[: 1 << 20], channels)
    finally:
        for one in channels:
            with suppress(asyncio.CancelledError):
                await one.close()
    print(
        f"{name}: {count} calls of {len(body) / 1e6:.0f} MB over {args.connections} connections; "
        f"resident MB {before:.0f} before, {highest:.0f} at most, "
        f"{watched:.0f} under {3 * args.connections} unread watches, "
        f"{resident_mb(process):.0f} after; {dict(ends)}"
    )
    refused = all(end in ("other UNAUTHENTICATED", "Health/Check OK") for end in ends)
    return Held(name, count, refused, max(highest, watched) - before, _LIMIT_MB)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        token = Path(scratch) / "token"
        token.write_text("sesame\n")
        stack = Stack(Path(scratch))
        guard = ("--auth-token-file", str(token), "--reflection")
        try:
            address = stack.start_executor(*guard)
            stack.start_scheduler(*guard, "--executor-token-file", str(token))
            stack.scheduler.wait_serving()
            held = [
                await attack(
                    "executor", stack.executor(address), methods(executor_pb2), bytes(60_000_000), args
                ),
                await attack(
                    "scheduler", stack.scheduler, methods(scheduler_pb2, admin_pb2), bytes(15_000_000), args
                ),
            ]
        finally:
            stack.kill()
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in held], indent=1) + "\n")
    return 0 if all(one.good for one in held) else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
