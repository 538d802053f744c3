"""Streams of a fleet by the Python client and by the OpenAI API, all with the tokens that each has alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from paceline import aio
from paceline.channel import Security

from tests.support.openai_door import Door, serving_door

Tokens = tuple[int, ...]


@dataclass
class Streams:
    """`each` streams by each way. `begun` of them have tokens in the present run."""

    client: aio.Client
    door: Door
    each: int
    tokens: int
    begun: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    continued: int = 0

    async def run(self) -> list[Tokens]:
        """The token ids of all; raises what one of them raises."""
        ways = (self._by_grpc, self._by_http)
        return await asyncio.gather(*(way(number) for way in ways for number in range(self.each)))

    async def until_begun(self, count: int) -> None:
        """Wait until further streams have their first tokens; those by HTTP can't be seen to begin."""
        for _ in range(count):
            await self.begun.acquire()

    async def _by_grpc(self, number: int) -> Tokens:
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
    async with (
        aio.Client(address, security=Security(token=token)) as client,
        serving_door(address) as door,
    ):
        door.key = token
        yield Streams(client, door, each, tokens)
