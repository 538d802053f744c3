"""Two stacks and two processes of the gateway before them, while stacks die and freeze: what do clients see?

usage: python -m tests.gateway.faults [--times 1] [--clients 16] [--model]

Executor, scheduler and all processes of each stack are killed and frozen in turn, and each is restarted,
under clients that send one request after another, most of them streamed. No request may fail, and
all texts and logprobs must be those of gRPC undisturbed. Prints a line for each fault; exit status 1 if one
was not held.
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

from paceline import aio

from tests.gateway.support import BackStack, gateway
from tests.model.default_model import default_model

SETTLED_S = 4.0
"""Load before and after a fault, at least."""
FROZEN_S = 6.0
"""Longer than the gateway takes to notice."""
EXECUTOR, SCHEDULER = "executor_service", "scheduler_service"
FAULTS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("executor killed", (EXECUTOR,), signal.SIGKILL),
    ("executor frozen", (EXECUTOR,), signal.SIGSTOP),
    ("scheduler killed", (SCHEDULER,), signal.SIGKILL),
    ("scheduler frozen", (SCHEDULER,), signal.SIGSTOP),
    ("stack killed", (), signal.SIGKILL),
    ("stack frozen", (), signal.SIGSTOP),
    ("stack restarted", (), signal.SIGTERM),
)
TOKENS = 300


@dataclass
class Seen:
    """What the clients saw during one fault."""

    wanted: int  # requests
    enough: asyncio.Event = field(default_factory=asyncio.Event)  # set when so many of them have ended
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0  # to a first token

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        errors = "".join(f"\n      {count} x {text}" for text, count in self.errors.most_common(5))
        return f"{counts}; longest wait for a first token {self.longest_s:.2f} s{errors}"

    def ended(self, outcome: str) -> None:
        """One request has."""
        self.counts[outcome] += 1
        if self.counts.total() >= self.wanted:
            self.enough.set()

    @property
    def good(self) -> bool:
        """Some were answered, and none was not."""
        return set(self.counts) == {"answered"}


def options(number: int) -> dict[str, Any]:
    """Of client `number`'s request, by either way."""
    return {"max_tokens": TOKENS, "seed": number, "temperature": 1.0}


Answer = tuple[str, list[float]]
"""Text, and the logprob of each token."""


async def undisturbed(address: str, clients: int) -> list[Answer]:
    """Each client's answer by gRPC."""
    async with aio.Client(address) as client:
        found = await asyncio.gather(
            *(client.complete("Once upon a time", logprobs=0, **options(one)) for one in range(clients))
        )
    return [(one.text, [token.logprob for token in one.logprobs]) for one in found]


async def one_request(api: Any, seen: Seen, number: int, expected: Answer, *, streamed: bool) -> None:
    import openai

    began, text, scores, finished = time.monotonic(), "", list[float](), False
    fields: dict[str, Any] = {
        "model": "",
        "prompt": "Once upon a time",
        "logprobs": 0,
        **options(number),
    }
    try:
        if not streamed:
            [choice] = (await api.completions.create(**fields)).choices
            text, scores, finished = choice.text, choice.logprobs.token_logprobs, True
        else:
            async for chunk in await api.completions.create(stream=True, **fields):
                if not scores:
                    seen.longest_s = max(seen.longest_s, time.monotonic() - began)
                for choice in chunk.choices:
                    text += choice.text
                    scores += choice.logprobs.token_logprobs if choice.logprobs else []
                    finished |= bool(choice.finish_reason)
        if finished and (text, scores) != expected:
            seen.ended("different")
        else:
            seen.ended("answered" if finished else "cut short")
    except openai.OpenAIError as error:
        seen.ended("interrupted" if scores else "refused")
        seen.errors[f"{type(error).__name__} after {len(scores)} tokens: {str(error)[:160]}"] += 1


async def client(api: Any, seen: list[Seen], stop: asyncio.Event, number: int, expected: Answer) -> None:
    """One request after another, every fourth one whole; what it sees is told to the last one of `seen`."""
    count = number
    while not stop.is_set():
        await one_request(api, seen[-1], number, expected, streamed=bool(count % 4))
        count += 1


async def strike(stack: BackStack, victims: tuple[str, ...], number: int) -> None:
    """One fault, until the stack serves again."""
    pids = stack.pids
    again = stack.serve.log.count("serves again")
    if number == signal.SIGTERM:
        await asyncio.to_thread(stack.stop)
        await asyncio.to_thread(stack.restart)
        return
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


async def run(url: str, stacks: list[BackStack], times: int, clients: int) -> bool:
    """All faults of each stack; returns whether all went well."""
    import openai

    expected = await undisturbed(stacks[0].address, clients)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as api:
        seen, stop = [Seen(clients)], asyncio.Event()
        tasks = [asyncio.create_task(client(api, seen, stop, *one)) for one in enumerate(expected)]
        await asyncio.sleep(SETTLED_S)
        print(f"{'undisturbed':22s} {seen[-1]}", flush=True)
        for name, victims, number in FAULTS * times:
            for place, stack in enumerate(stacks):
                seen.append(Seen(clients))
                await asyncio.sleep(1)
                await strike(stack, victims, number)
                await asyncio.sleep(SETTLED_S)
                await seen[-1].enough.wait()
                verdict = "held" if seen[-1].good else "NOT HELD"
                print(f"{name + f', {place + 1}':22s} {verdict}: {seen[-1]}", flush=True)
        stop.set()
        await asyncio.gather(*tasks)
        return all(one.good for one in seen)


def main() -> int:
    """Parse the command line, and run."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--times", type=int, default=1, help="how often each fault strikes")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--model", action="store_true", help="the default model instead of the oracle")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory, stacks = Path(name), []
        try:
            flags = ("--model", str(default_model())) if given.model else ("-E", "step-ms=10")
            backend = "torch" if given.model else "oracle"
            stacks = [BackStack(directory / str(i), *flags, backend=backend) for i in range(2)]
            for stack in stacks:
                assert stack.serve.address
            addresses = [stack.address for stack in stacks]
            with gateway(directory, addresses, "--gateway-processes", "2", "--log-level", "error") as url:
                return 0 if asyncio.run(run(url, stacks, given.times, given.clients)) else 1
        finally:
            for stack in stacks:
                stack.stop()


if __name__ == "__main__":
    sys.exit(main())
