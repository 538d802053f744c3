"""What two stacks behind the OpenAI API find cached of chats with one of 32 long system prompts.

usage: python -m tests.bench.door_routing [--requests 400] [--systems 32] [--pages 1200] [--pairs 3]

Each chat begins with a system prompt of 800 tokens, drawn at random with a fixed seed, and goes on with a
question of its own. A stack's pages hold some of the system prompts, and not all. Compared, on fresh stacks
in turn, are the server's choice of the stack, the client's own affinity key, and each stack in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

from paceline_openai.beginnings import Beginnings

from tests.bench.affinity import figures
from tests.support.openai_door import Door, serving_door
from tests.support.stack import oracle_stack

SYSTEM_CHARACTERS = 800  # a token each
AT_ONCE = 8
WORDS = ["fox", "step", "blue", "sky", "page", "token", "draft", "train", "river", "stone"]


def trace(requests: int, systems: int) -> list[list[dict[str, str]]]:
    """The messages of each chat."""
    draw = random.Random(14)
    prompts = [" ".join(draw.choices(WORDS, k=SYSTEM_CHARACTERS))[:SYSTEM_CHARACTERS] for _ in range(systems)]
    return [
        [
            {"role": "system", "content": draw.choice(prompts)},
            {"role": "user", "content": " ".join(draw.choices(WORDS, k=10))},
        ]
        for _ in range(requests)
    ]


async def replay(doors: Sequence[Door], chats: list[list[dict[str, str]]]) -> None:
    """Hold the chats, AT_ONCE side by side, at the next door each."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, messages: list[dict[str, str]]) -> None:
        async with places:
            fields: dict[str, Any] = {"messages": messages, "max_tokens": 4}
            answer = await doors[number % len(doors)].ask("/v1/chat/completions", fields)
            assert answer.status == 200, answer.body

    await asyncio.gather(*(one(*numbered) for numbered in enumerate(chats)))


async def measure(way: str, pages: int, chats: list[list[dict[str, str]]]) -> float:
    """The cached share of prompt tokens, on fresh stacks."""
    own = Beginnings.affinity_key
    with ExitStack() as opened, tempfile.TemporaryDirectory() as folder:
        flags = ("--pages", str(pages), "--step-ms", "1")
        stacks = [opened.enter_context(oracle_stack(Path(folder, str(i)), executor=flags)) for i in range(2)]
        addresses = [stack.scheduler.address for stack in stacks]
        async with AsyncExitStack() as served:
            groups = [[one] for one in addresses] if way == "in turn" else [addresses]
            doors = [await served.enter_async_context(serving_door(*group)) for group in groups]
            if way == "client's key":
                Beginnings.affinity_key = lambda *_: ""  # type: ignore[method-assign]
            try:
                await replay(doors, chats)
            finally:
                Beginnings.affinity_key = own  # type: ignore[method-assign]
        return (await figures(addresses)).share


async def main() -> None:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--systems", type=int, default=32)
    parser.add_argument("--pages", type=int, default=1200, help="of each stack, of 16 tokens")
    parser.add_argument("--pairs", type=int, default=3)
    given = parser.parse_args()
    chats = trace(given.requests, given.systems)
    found: dict[str, list[float]] = {"server's choice": [], "client's key": [], "in turn": []}
    for _ in range(given.pairs):
        for way, shares in found.items():
            shares.append(await measure(way, given.pages, chats))
    for way, shares in found.items():
        runs = ", ".join(f"{one:.3f}" for one in shares)
        print(f"{way:16s} {statistics.median(shares):.3f} of prompt tokens cached ({runs})")


if __name__ == "__main__":
    asyncio.run(main())
