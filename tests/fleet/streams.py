"""Streams of a fleet by the clients of Python and Node and by the OpenAI API, each with its tokens alone."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from paceline import aio
from paceline.channel import Security

from tests.support.checkout import ROOT
from tests.support.openai_door import Door, serving_door

Tokens = tuple[int, ...]
NODE_CLIENT = ROOT / "clients" / "node"


@dataclass
class Streams:
    """`each` streams by each way. `begun` of them have tokens in the present run."""

    client: aio.Client
    node: Process
    door: Door
    each: int
    tokens: int
    begun: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    continued: int = 0

    async def run(self) -> list[Tokens]:
        """The token ids of all, one way after the other; raises what one of them raises."""
        numbers = range(self.each)
        [by_python, by_node, by_http] = await asyncio.gather(
            asyncio.gather(*map(self._by_python, numbers)),
            self._by_node(),
            asyncio.gather(*map(self._by_http, numbers)),
        )
        return [*by_python, *by_node, *by_http]

    async def until_begun(self, count: int) -> None:
        """Wait until further streams have their first tokens; those by HTTP can't be seen to begin."""
        for _ in range(count):
            await self.begun.acquire()

    async def _by_node(self) -> list[Tokens]:
        assert self.node.stdin is not None
        assert self.node.stdout is not None
        self.node.stdin.write(b"%d\n" % self.each)
        found: dict[int, Tokens] = {}
        while len(found) < self.each:
            line = json.loads(await self.node.stdout.readline())
            assert "error" not in line, line
            if "begun" in line:
                self.begun.release()
            else:
                found[line["number"]] = tuple(line["ids"])
        return [found[number] for number in range(self.each)]

    async def _by_python(self, number: int) -> Tokens:
        stream = self.client.generate(
            token_ids=[1, 2, number], max_tokens=self.tokens, seed=7, affinity_key=str(number)
        )
        await anext(stream)
        self.begun.release()
        [completion] = await stream.collect()
        self.continued += stream.resumptions > 0
        return completion.token_ids

    async def _by_http(self, number: int) -> Tokens:
        fields = {"max_tokens": self.tokens, "seed": 7, "stream": True, "return_token_ids": True}
        answer = await self.door.complete([1, 2, number], **fields)
        assert answer.status == 200, answer.body
        found: list[int] = []
        for event in answer.events:
            assert "error" not in event, event
            for choice in event["choices"]:
                found += choice.get("token_ids", [])
        return tuple(found)


@asynccontextmanager
async def streams_at(address: str, token: str, each: int, tokens: int) -> AsyncIterator[Streams]:
    """Streams of clients that were given one address, and have learned of the others."""
    if not (NODE_CLIENT / "node_modules").exists():
        install = ["npm", "ci", "--no-audit", "--no-fund"]
        await asyncio.to_thread(subprocess.run, install, cwd=NODE_CLIENT, check=True)
    script = str(Path(__file__).with_name("streams.mjs"))
    node = await asyncio.create_subprocess_exec(
        "node",
        script,
        address,
        str(tokens),
        stdin=PIPE,
        stdout=PIPE,
        env={**os.environ, "PACELINE_TOKEN": token},
    )
    try:
        async with (
            aio.Client(address, security=Security(token=token)) as client,
            serving_door(address) as door,
        ):
            door.key = token
            yield Streams(client, node, door, each, tokens)
    finally:
        node.kill()
        await node.wait()
