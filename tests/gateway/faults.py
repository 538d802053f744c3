"""Two stacks behind one gateway while one of them dies and freezes: what do clients of the OpenAI API see?

usage: python -m tests.gateway.faults [--times 2] [--clients 8]

Executor, scheduler and all processes of the first stack are killed and frozen in turn, under clients that
send one request after another, every second one streamed. No request may fail, and no stream may end before
its finish_reason. Prints a line for each fault; exit status 1 if one did.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gateway.support import BackStack, gateway

SETTLED_S = 8.0
"""Load before and after a fault."""
FROZEN_S = 15.0
"""Longer than the gateway takes to notice."""
EXECUTOR, SCHEDULER = "executor_service", "scheduler_service"
FAULTS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("executor killed", (EXECUTOR,), signal.SIGKILL),
    ("executor frozen", (EXECUTOR,), signal.SIGSTOP),
    ("scheduler killed", (SCHEDULER,), signal.SIGKILL),
    ("scheduler frozen", (SCHEDULER,), signal.SIGSTOP),
    ("stack killed", (), signal.SIGKILL),
    ("stack frozen", (), signal.SIGSTOP),
)


@dataclass
class Seen:
    """What the clients saw during one fault."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0  # to a first token

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        errors = "".join(f"\n      {count} x {text}" for text, count in self.errors.most_common(5))
        return f"{counts}; longest wait for a first token {self.longest_s:.2f} s{errors}"

    @property
    def good(self) -> bool:
        """All were answered."""
        return set(self.counts) <= {"answered"}


async def one_request(api: Any, seen: Seen, *, streamed: bool) -> None:
    import openai

    began, chunks, finished = time.monotonic(), 0, False
    options: dict[str, Any] = {
        "model": "oracle",
        "prompt": "Once upon a time",
        "extra_body": {"ignore_eos": True},
    }
    try:
        if not streamed:
            await api.completions.create(max_tokens=8, **options)
            chunks, finished = 1, True
            seen.longest_s = max(seen.longest_s, time.monotonic() - began)
        else:
            async for chunk in await api.completions.create(max_tokens=100, stream=True, **options):
                if not chunks:
                    seen.longest_s = max(seen.longest_s, time.monotonic() - began)
                chunks += 1
                finished |= bool(chunk.choices and chunk.choices[0].finish_reason)
        seen.counts["answered" if finished else "cut short"] += 1
    except openai.OpenAIError as error:
        seen.counts["interrupted" if chunks else "refused"] += 1
        seen.errors[f"{type(error).__name__} after {chunks} chunks: {str(error)[:160]}"] += 1


async def client(api: Any, seen: list[Seen], stop: asyncio.Event, number: int) -> None:
    """One request after another; what it sees is told to the last one of `seen`."""
    while not stop.is_set():
        await one_request(api, seen[-1], streamed=bool(number % 2))
        number += 1


async def strike(stack: BackStack, victims: tuple[str, ...], number: int) -> None:
    """One fault, until the stack serves again."""
    pids = stack.pids
    again = stack.serve.log.count("serves again")
    if not victims and number == signal.SIGKILL:
        stack.kill()
        await asyncio.sleep(FROZEN_S)
        await asyncio.to_thread(stack.restart)
        return
    struck = [pids[name] for name in victims] if victims else list(pids.values())
    for pid in struck:
        os.kill(pid, number)
    if victims:  # serve replaces what is dead or frozen
        await asyncio.to_thread(stack.serve.wait_for, "serves again", again + 1)
    else:
        await asyncio.sleep(FROZEN_S)
        for pid in struck:
            os.kill(pid, signal.SIGCONT)


async def run(url: str, stack: BackStack, times: int, clients: int) -> bool:
    """All faults; returns whether all went well."""
    import openai

    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as api:
        seen, stop = [Seen()], asyncio.Event()
        tasks = [asyncio.create_task(client(api, seen, stop, number)) for number in range(clients)]
        await asyncio.sleep(SETTLED_S)
        print(f"{'undisturbed':18s} {seen[-1]}", flush=True)
        good = seen[-1].good
        for name, victims, number in FAULTS * times:
            seen.append(Seen())
            await asyncio.sleep(1)
            await strike(stack, victims, number)
            await asyncio.sleep(SETTLED_S)
            print(f"{name:18s} {'held' if seen[-1].good else 'NOT HELD'}: {seen[-1]}", flush=True)
            good &= seen[-1].good
        stop.set()
        await asyncio.gather(*tasks)
        return good


def main() -> int:
    """Parse the command line, and run."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--times", type=int, default=1, help="how often each fault strikes")
    parser.add_argument("--clients", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory, stacks = Path(name), []
        try:
            stacks = [BackStack(directory / str(i), "-E", "step-ms=10") for i in range(2)]
            for stack in stacks:
                assert stack.serve.address
            with gateway(directory, [stack.address for stack in stacks], "--log-level", "error") as url:
                return 0 if asyncio.run(run(url, stacks[0], given.times, given.clients)) else 1
        finally:
            for stack in stacks:
                stack.stop()


if __name__ == "__main__":
    sys.exit(main())
