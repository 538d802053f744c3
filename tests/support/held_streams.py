"""Streams that their clients hold while services die or freeze, compared with undisturbed ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import paceline
from paceline import aio
from paceline.errors import PacelineError
from paceline.failover import FAILOVER_TIMEOUT_S
from paceline.types import Completion, Delta, Event, Usage

END_S = 300.0  # of anything here: machines stand still


@dataclass
class HeldStream:
    """A stream read to its end, and when its events came."""

    generation: aio.Generation
    events: list[tuple[float, Event]] = field(default_factory=list)
    error: PacelineError | TimeoutError | None = None

    @property
    def completions(self) -> list[Completion]:
        """What came, but for times and the like."""
        collector = paceline.collector.Collector()
        for _, event in self.events:
            collector.add(event)
        return [essence(one) for one in collector.completions()]

    @property
    def longest_pause_s(self) -> float:
        """Between two events."""
        times = [at for at, _ in self.events]
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)

    def ended_before(self, moment: float) -> bool:
        """Whether the last event had come at this time of time.monotonic()."""
        return self.error is None and self.events[-1][0] < moment


def essence(one: Completion) -> Completion:
    """A completion without what depends on time and on neighbours."""
    assert one.finished is not None
    usage = one.finished.usage
    usage = Usage(usage.prompt_tokens, 0, usage.completion_tokens, 0, 0, 0, 0, 0, 0)
    return replace(one, finished=replace(one.finished, usage=usage))


def generation(client: aio.Client, seed: int, tokens: int) -> aio.Generation:
    """A sampled stream of its own: the seed says everything of it."""
    return client.generate(
        f"Prompt number {seed}, and what follows it",
        max_tokens=tokens,
        seed=seed,
        temperature=0.8,
        ignore_eos=True,
        logprobs=1,
        n=1 + seed % 2,
    )


async def undisturbed(addresses: Sequence[str], streams: int, tokens: int) -> list[list[Completion]]:
    """What all streams bring while nothing happens."""
    async with aio.Client(addresses) as client, asyncio.timeout(END_S):
        runs = [generation(client, seed, tokens).collect() for seed in range(streams)]
        return [[essence(one) for one in run] for run in await asyncio.gather(*runs)]


async def held(
    addresses: Sequence[str],
    disturb: Callable[[], None],
    streams: int,
    tokens: int,
    *,
    after_tokens: int = 1,
    end_s: float = END_S,
    failover_timeout_s: float = FAILOVER_TIMEOUT_S,
) -> list[HeldStream]:
    """All streams, disturbed when each has had so many tokens; an error of one ends that one alone."""
    begun = [asyncio.Event() for _ in range(streams)]

    async def read(client: aio.Client, seed: int) -> HeldStream:
        one, received = HeldStream(generation(client, seed, tokens)), 0
        try:
            async with asyncio.timeout(end_s):
                async for event in one.generation:
                    one.events.append((time.monotonic(), event))
                    received += len(event.token_ids) if isinstance(event, Delta) else 0
                    if received >= after_tokens:
                        begun[seed].set()
        except (PacelineError, TimeoutError) as error:
            one.error = error
        begun[seed].set()
        return one

    async with aio.Client(addresses, failover_timeout_s=failover_timeout_s) as client:
        reads = [asyncio.create_task(read(client, seed)) for seed in range(streams)]
        for one in begun:
            await one.wait()
        disturb()
        return list(await asyncio.gather(*reads))
