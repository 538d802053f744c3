"""Streams of JSON objects whose executor is killed while they are open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline import aio
from paceline.collector import Collector
from paceline.types import Completion, Delta

from tests.grammars.questions import GrammarQuestion
from tests.support.stack import Stack, eventually

RESTART_S = 600.0
"""A model may load slowly on a busy machine: `--failover-timeout-s` of the scheduler, with `kill_amid`."""


@dataclass
class WatchedStream:
    """A question under way: what its client has received so far."""

    question: GrammarQuestion
    received: int = 0  # tokens, of all completions
    _collector: Collector = field(default_factory=Collector)

    async def read(self, generation: aio.Generation, on_tokens: Callable[[], None]) -> list[Completion]:
        """Read it to its end; calls `on_tokens` whenever there are new ones."""
        async for event in generation:
            self._collector.add(event)
            if isinstance(event, Delta):
                self.received += len(event.token_ids)
                on_tokens()
        return self.completions

    @property
    def completions(self) -> list[Completion]:
        """All that have begun."""
        return self._collector.completions()

    @property
    def unfinished(self) -> int:
        """Completions without an end, begun or not."""
        ended = sum(one.finished is not None for one in self.completions)
        return int(self.question.options.get("n", 1)) - ended

    @property
    def open_objects(self) -> dict[int, tuple[int, ...]]:
        """The ids, by index, of JSON objects that have begun and are not closed."""
        if not self.question.is_object:
            return {}
        return {one.index: one.token_ids for one in self.completions if _is_open(one)}


@dataclass(frozen=True)
class Kill:
    """What a kill of an executor found, and what came of the streams."""

    answers: list[list[Completion]]
    tokens: list[int]
    """Of each object that was open while no executor lived: how many its client had. All had more later."""


def _is_open(one: Completion) -> bool:
    if one.finished is not None or not one.text.startswith("{"):
        return False
    try:
        json.loads(one.text)
    except ValueError:
        return True
    return False


async def kill_amid(
    stack: Stack,
    address: str,
    client: aio.Client,
    streams: Sequence[tuple[GrammarQuestion, aio.Generation]],
    target: int,
    after: int,
) -> Kill:
    """Kill the executor when stream `target` has had `after` tokens, restart it, and read all streams on.

    The scheduler has no other streams and no other executor, and waits RESTART_S for one. The executor starts
    again when the loss was noticed and all tokens have come that were computed before it.
    """
    before = (await client.status()).completion_tokens
    losses = await _losses(client)
    watched = [WatchedStream(question) for question, _ in streams]
    process, killed = stack.executor(address), asyncio.Event()

    def kill() -> None:
        if not killed.is_set() and watched[target].received >= after:
            process.kill()
            killed.set()

    async def settled() -> bool:
        """The scheduler has no executor, and says that its clients have everything but what it waits for."""
        if await _losses(client) == losses:
            return False
        status = await client.status()
        received = sum(one.received for one in watched)
        unfinished = sum(one.unfinished for one in watched)
        queued = status.running + status.waiting
        return (received, unfinished) == (status.completion_tokens - before, queued)

    async with asyncio.timeout(RESTART_S), asyncio.TaskGroup() as group:
        reads = [
            group.create_task(one.read(generation, kill))
            for one, (_, generation) in zip(watched, streams, strict=True)
        ]
        await killed.wait()
        await eventually(settled, "the loss is not noticed", RESTART_S)
        found = [one.open_objects for one in watched]
        await asyncio.to_thread(stack.restart_executor, address)
    answers = [read.result() for read in reads]
    for objects, answer in zip(found, answers, strict=True):
        for index, ids in objects.items():
            assert len(answer[index].token_ids) > len(ids)
    return Kill(answers, [len(ids) for objects in found for ids in objects.values()])


async def _losses(client: aio.Client) -> int:
    return sum(one.losses for one in await client.executors() if not one.draft)
