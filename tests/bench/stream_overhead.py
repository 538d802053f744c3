"""What Paceline itself costs: streamed tokens per second with an oracle that computes in no time.

    python -m tests.bench.stream_overhead                     # 64 clients, 20 s
    python -m tests.bench.stream_overhead --seconds 600       # memory over ten minutes

Executor, scheduler and all clients share this machine's cores. Each client sends one request after
the other. Reported: tokens and messages per second over the whole run, the median of one-second
windows, the CPU time that a token cost in each process (a measure that neighbours on the machine
disturb less), and the resident memory of both services at the start (after a warm-up) and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import grpc.aio
import uvloop
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc

from tests.support.stack import Stack, oracle_stack

WARM_UP_S = 3.0


class Load:
    """Counts what all clients got."""

    def __init__(self, address: str, clients: int, tokens: int) -> None:
        self.tokens = self.messages = self.requests = 0
        self._address, self._clients, self._length = address, clients, tokens

    async def run(self) -> None:
        """Until cancelled."""
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = rpc.SchedulerServiceStub(channel)
            await asyncio.gather(*(self._client(stub, seed) for seed in range(self._clients)))

    async def _client(self, stub: rpc.SchedulerServiceAsyncStub, seed: int) -> None:
        rng = random.Random(seed)
        while True:
            prompt = [rng.randrange(256) for _ in range(16)]
            call = stub.Generate(
                pb.GenerateRequest(
                    token_ids=pb.TokenIds(ids=prompt),
                    stop=pb.StopConditions(max_tokens=self._length, ignore_eos=True),
                )
            )
            while isinstance(message := await call.read(), pb.GenerateResponse):
                self.messages += 1
                self.tokens += len(message.delta.token_ids)
            self.requests += 1


def resident_mib(pid: int) -> float:
    """From /proc."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def cpu_s(stack: Stack) -> list[float]:
    """CPU time so far: executor, scheduler, clients (this process)."""
    seconds = []
    for pid in (stack.executor(stack.addresses[0]).pid, stack.scheduler.pid, os.getpid()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return seconds


def memory(stack: Stack) -> str:
    """Of both services."""
    executor = resident_mib(stack.executor(stack.addresses[0]).pid)
    return f"executor {executor:.1f} MiB, scheduler {resident_mib(stack.scheduler.pid):.1f} MiB"


async def measure(stack: Stack, clients: int, tokens: int, seconds: float) -> None:
    """Run the load and print."""
    load = Load(stack.scheduler.address, clients, tokens)
    running = asyncio.create_task(load.run())
    await asyncio.sleep(WARM_UP_S)
    print(f"memory, start: {memory(stack)}")
    began, before, windows = time.monotonic(), (load.tokens, load.messages, load.requests), []
    last, cpu_before = (began, load.tokens), cpu_s(stack)
    report_at = began + 60.0
    while time.monotonic() - began < seconds:
        await asyncio.sleep(1.0)
        if time.monotonic() > report_at:
            report_at += 60.0
            print(f"memory, {time.monotonic() - began:4.0f} s: {memory(stack)}", flush=True)
        now = time.monotonic(), load.tokens
        windows.append((now[1] - last[1]) / (now[0] - last[0]))
        last = now
    elapsed = time.monotonic() - began
    got = [
        after - start
        for after, start in zip((load.tokens, load.messages, load.requests), before, strict=True)
    ]
    print(f"memory, end:   {memory(stack)}")
    print(
        f"{clients} clients, {elapsed:.0f} s, {got[2]} requests: {got[0] / elapsed:.0f} tokens/s "
        f"(median second {statistics.median(windows):.0f}), {got[1] / elapsed:.0f} messages/s"
    )
    spent = [(now - then) / got[0] * 1e6 for now, then in zip(cpu_s(stack), cpu_before, strict=True)]
    print("CPU per token: executor {:.0f} µs, scheduler {:.0f} µs, clients {:.0f} µs".format(*spent))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def main() -> None:
    """Parse, start the services, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of each request")
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        oracle_stack(
            Path(directory), executor=["--pages", "8192"], scheduler=["--log-level", "warning"]
        ) as stack,
    ):
        uvloop.run(measure(stack, arguments.clients, arguments.tokens, arguments.seconds))


if __name__ == "__main__":
    main()
