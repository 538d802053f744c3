"""Prompt tokens found in prefix caches on two stacks behind one gateway: cache_aware beside round_robin.

usage: python -m tests.bench.gateway_routing [--requests 400] [--systems 32] [--pages 1200]

A trace of chats that begin with one of `--systems` system prompts of 800 tokens, drawn at random with a fixed
seed, and go on with a question of their own. A stack's pages hold some of the system prompts, and not all.
Each policy gets two fresh stacks. Prints a JSON line for each, and the ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from tests.gateway.support import BackStack, gateway

POLICIES = ("round_robin", "cache_aware")
SYSTEM_CHARACTERS = 800  # a token each
AT_ONCE = 8


def trace(requests: int, systems: int) -> list[list[dict[str, str]]]:
    """The messages of each chat."""
    draw = random.Random(14)
    words = ["fox", "step", "blue", "sky", "page", "token", "draft", "train", "river", "stone"]
    prompts = [" ".join(draw.choices(words, k=SYSTEM_CHARACTERS))[:SYSTEM_CHARACTERS] for _ in range(systems)]
    return [
        [
            {"role": "system", "content": draw.choice(prompts)},
            {"role": "user", "content": " ".join(draw.choices(words, k=10))},
        ]
        for _ in range(requests)
    ]


async def replay(url: str, chats: list[list[dict[str, str]]]) -> dict[str, Any]:
    import openai

    prompt = cached = 0
    turns = asyncio.Semaphore(AT_ONCE)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as api:

        async def one(messages: list[dict[str, str]]) -> None:
            nonlocal prompt, cached
            async with turns:
                create: Any = api.chat.completions.create
                answer = await create(model="oracle", messages=messages, max_tokens=4)
            prompt += answer.usage.prompt_tokens
            cached += answer.usage.prompt_tokens_details.cached_tokens

        await asyncio.gather(*map(one, chats))
    return {"prompt_tokens": prompt, "cached_tokens": cached, "found": round(cached / prompt, 3)}


def main() -> None:
    """Parse the command line, and measure."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--systems", type=int, default=32)
    parser.add_argument("--pages", type=int, default=1200, help="of each stack, of 16 tokens")
    given = parser.parse_args()
    chats, found = trace(given.requests, given.systems), []
    for policy in POLICIES:
        with tempfile.TemporaryDirectory() as name:
            directory, stacks = Path(name), []
            try:
                stacks = [BackStack(directory / str(i), "-E", f"pages={given.pages}") for i in range(2)]
                for stack in stacks:
                    assert stack.serve.address
                workers = [stack.worker for stack in stacks]
                with gateway(directory, workers, "--log-level", "error", "-G", f"policy={policy}") as url:
                    result = asyncio.run(replay(url, chats))
            finally:
                for stack in stacks:
                    stack.stop()
        found.append(result["found"])
        print(json.dumps({"policy": policy, **result}), flush=True)
    print(json.dumps({"ratio": round(found[1] / found[0], 3)}))


if __name__ == "__main__":
    main()
