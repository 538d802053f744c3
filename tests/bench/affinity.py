"""What affinity is worth: prompt tokens found in the caches of several stacks, in long conversations.

    python -m tests.bench.affinity                  # 200 conversations, 4 stacks
    python -m tests.bench.affinity --turns 3 --conversations 40

Conversations of eight system prompts are held side by side, by a client that knows all stacks. Their model is
the oracle: only routing is measured. Compared are the client's own choice, each call to the next stack in
turn, and one stack whose cache is as large as all of theirs together. Printed are the share of prompt tokens
that were cached, the share of one cache's, and the prompt tokens that the fullest stack computed, by the
mean.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from paceline import aio

from tests.support.stack import Stack

SYSTEMS, SYSTEM_BYTES, TURN_BYTES, ANSWER_TOKENS, AT_ONCE = 8, 800, 300, 24, 16


@dataclass(frozen=True)
class Outcome:
    """Prompt tokens of all calls, those of them that were cached, and those that each stack computed."""

    prompt: int
    cached: int
    computed: tuple[int, ...]

    @property
    def share(self) -> float:
        """Of the prompt tokens that were cached."""
        return self.cached / self.prompt

    @property
    def fullest(self) -> float:
        """Tokens that the fullest stack computed, by the mean."""
        return max(self.computed) * len(self.computed) / sum(self.computed)


def text(seed: str, size: int) -> str:
    """Words at random."""
    draw = random.Random(seed)
    return " ".join(f"{draw.getrandbits(20):x}" for _ in range(size // 6))


async def converse(clients: Sequence[aio.Client], number: int, turns: int) -> None:
    """Hold a conversation: each turn's call is of the next client."""
    messages = [{"role": "system", "content": text(f"system {number % SYSTEMS}", SYSTEM_BYTES)}]
    for turn in range(turns):
        messages.append({"role": "user", "content": text(f"{number} {turn}", TURN_BYTES)})
        client = clients[(number + turn) % len(clients)]
        done = await client.complete(messages=messages, max_tokens=ANSWER_TOKENS, seed=number)
        messages.append({"role": "assistant", "content": done.text})


async def hold(clients: Sequence[aio.Client], conversations: int, turns: int) -> None:
    """All conversations, AT_ONCE side by side, in an order at random."""
    numbers = list(range(conversations))
    random.Random(0).shuffle(numbers)
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with places:
            await converse(clients, number, turns)

    await asyncio.gather(*map(one, numbers))


async def figures(addresses: Sequence[str]) -> Outcome:
    """What the schedulers have counted."""
    counted = []
    for address in addresses:
        async with aio.Client(address) as client:
            counted.append(await client.status())
    computed = tuple(one.prompt_tokens - one.cached_tokens for one in counted)
    return Outcome(
        sum(one.prompt_tokens for one in counted), sum(one.cached_tokens for one in counted), computed
    )


async def measure(
    stacks: int, pages: int, conversations: int, turns: int, *, in_turn: bool = False
) -> Outcome:
    """Hold the conversations on fresh stacks."""
    with ExitStack() as opened, tempfile.TemporaryDirectory() as folder:
        addresses: list[str] = []
        for number in range(stacks):
            stack = Stack(Path(folder, str(number)))
            opened.callback(stack.kill)
            stack.start_executor("--pages", str(pages), "--step-ms", "1")
            stack.start_scheduler()
            addresses.append(stack.scheduler.wait_serving().address)
        clients = [aio.Client(one) for one in addresses] if in_turn else [aio.Client(addresses)]
        try:
            await hold(clients, conversations, turns)
        finally:
            for client in clients:
                await client.close()
        return await figures(addresses)


async def main() -> None:
    """Measure all three, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--stacks", type=int, default=4)
    parser.add_argument("--pages", type=int, default=12288, help="of one stack")
    given = parser.parse_args()
    shape = given.conversations, given.turns
    one = await measure(1, given.stacks * given.pages, *shape)
    print(f"one cache of all pages: {one.share:.4f} of {one.prompt} prompt tokens cached")
    for name, in_turn in (("affinity", False), ("in turn", True)):
        found = await measure(given.stacks, given.pages, *shape, in_turn=in_turn)
        print(
            f"{name}, {given.stacks} stacks: {found.share:.4f} cached, {found.share / one.share:.4f} of one"
            f" cache's; the fullest stack computed {found.fullest:.2f} of the mean"
        )


if __name__ == "__main__":
    asyncio.run(main())
