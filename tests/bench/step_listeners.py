"""1,000 callers who watch the steps, and read nothing: how many are taken, and what they cost the others.

    python -m tests.bench.step_listeners [--callers 1000] [--seconds 15]

On a served oracle eight streams run, alone, beside callers of 100 identities, each of which calls WatchSteps
and does not read, and alone again. Printed are the calls that were taken and refused (at most 64 and 16 of an
identity are taken), the tokens per second of the streams, the scheduler's memory, and what one of the callers
finds who reads at last: all steps, or the number of those that it lost. Exit status 1 if more are taken, a
refusal has no reason, or memory grows by more than 32 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc.aio
from paceline import Security, aio
from paceline.cli.token import entry
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc

from scheduler_service.rpc.step_calls import MAX_READERS
from tests.bench.figures import Line, report
from tests.support.stack import Stack, oracle_stack

IDENTITIES, STREAMS = 100, 8


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) / 256


async def tokens_per_s(stack: Stack, seconds: float) -> float:
    """Of all streams, while they run."""
    count, ends = 0, time.monotonic() + seconds

    async def stream(client: aio.Client, number: int) -> None:
        nonlocal count
        while time.monotonic() < ends:
            await client.complete(f"stream {number}", max_tokens=50, ignore_eos=True)
            count += 50

    async with aio.Client(stack.scheduler.address, security=Security(token="who-0")) as client:
        began = time.monotonic()
        await asyncio.gather(*(stream(client, number) for number in range(STREAMS)))
        return count / (time.monotonic() - began)


async def listen(stack: Stack, callers: int) -> tuple[list[Any], Counter[str]]:
    """The calls that were taken, none of which is read, and the errors of the others."""
    channels = [grpc.aio.insecure_channel(stack.scheduler.address) for _ in range(callers // 50)]
    stubs = [rpc.SchedulerServiceStub(channel) for channel in channels]
    taken: list[Any] = []
    refused: Counter[str] = Counter()

    async def call(number: int) -> None:
        metadata = (("authorization", f"Bearer who-{number % IDENTITIES}"),)
        stub: Any = stubs[number % len(stubs)]
        watching = stub.WatchSteps(pb.WatchStepsRequest(first_step=1), metadata=metadata)
        try:
            await watching.read()
            taken.append(watching)
        except grpc.aio.AioRpcError as error:
            refused[f"{error.code().name}: {error.details()}"] += 1

    for begin in range(0, callers, 100):
        await asyncio.gather(*map(call, range(begin, min(callers, begin + 100))))
    return taken, refused


async def measure(stack: Stack, callers: int, seconds: float) -> int:
    """Print what happens."""
    pid = stack.scheduler.pid
    alone = await tokens_per_s(stack, seconds)
    before = memory_mib(pid)
    taken, refused = await listen(stack, callers)
    beside = await tokens_per_s(stack, seconds)
    grown = memory_mib(pid) - before
    read, lost, steps = 0, 0, 0
    while True:
        try:
            message = await asyncio.wait_for(taken[0].read(), 2.0)
        except TimeoutError:
            break
        read, steps, lost = read + 1, steps + len(message.log.tokens), lost + message.log.lost_steps
    for call in taken:
        call.cancel()
    again = await tokens_per_s(stack, seconds)
    print(f"streams: {alone:.0f} tokens/s alone, {beside:.0f} beside the callers, {again:.0f} alone again")
    print(f"{len(taken)} taken; refused: {dict(refused)}")
    print(f"scheduler: {before:.1f} MiB before, {grown:+.1f} MiB")
    print(f"one that reads at last: {read} messages, {steps} steps, {lost} lost")
    lines = [
        Line("listeners", "calls that were taken", len(taken), most=MAX_READERS),
        Line("listeners", "kinds of refusals", len(refused), most=1),
        Line("listeners", "growth of the scheduler, MiB", grown, most=32),
    ]
    return report(lines, None)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--callers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=15.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        tokens = Path(name) / "tokens.yaml"
        tokens.write_text("".join(f"{entry(f'who-{i}', f'who-{i}')}\n" for i in range(IDENTITIES)))
        with oracle_stack(
            Path(name), executor=("--step-ms", "2"), scheduler=("--tokens-file", str(tokens))
        ) as stack:
            return asyncio.run(measure(stack, arguments.callers, arguments.seconds))


if __name__ == "__main__":
    sys.exit(main())
