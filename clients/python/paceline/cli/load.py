"""Generates load on a scheduler and measures it, for `bench` and `demo`.

Times are readings of time.perf_counter, in seconds.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline import aio
from paceline.requests import Options
from paceline.types import Delta, Event, Finished, ModelInfo, Speculation


@dataclass(slots=True)
class Trace:
    """The times of one stream, as its client saw them."""

    started: float
    ended: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens) of deltas with tokens
    finished: Finished | None = None

    def record(self, event: Event, now: float) -> None:
        """Record one event that arrived at `now`."""
        if isinstance(event, Finished):
            self.finished, self.ended = event, now
        elif event.token_ids:
            self.arrivals.append((now, len(event.token_ids)))

    @property
    def tokens(self) -> int:
        """Tokens received so far."""
        return sum(count for _, count in self.arrivals)

    @property
    def first_token_s(self) -> float | None:
        """Time to first token (TTFT); None before the first token."""
        return self.arrivals[0][0] - self.started if self.arrivals else None

    def gaps_s(self) -> list[float]:
        """Inter-token latencies (ITL): one per token after the first delta.

        Tokens that arrive in one delta share the gap before it equally.
        """
        return [
            (now - before) / count
            for (before, _), (now, count) in zip(self.arrivals, self.arrivals[1:], strict=False)
            for _ in range(count)
        ]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of a sample, in the sample's unit."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, sample: Sequence[float]) -> Percentiles:
        """Linear interpolation between the closest ranks; zeros for an empty sample."""
        if not sample:
            return cls(0.0, 0.0, 0.0, 0.0)
        if len(sample) == 1:
            return cls(sample[0], sample[0], sample[0], sample[0])
        cuts = statistics.quantiles(sample, n=100, method="inclusive")
        return cls(cuts[49], cuts[89], cuts[98], max(sample))


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a load."""

    requests: int
    tokens: int
    duration_s: float  # from the first start to the last end
    tokens_per_s: float  # over that whole time
    decode_tokens_per_s: float | None  # median of rounds; see `decode_rate`; None if no round had any
    ttft_ms: Percentiles
    itl_ms: Percentiles
    queue_ms: Percentiles  # as the scheduler reports it
    cached_tokens: int
    preemptions: int


def decode_rate(traces: Sequence[Trace]) -> float | None:
    """Tokens per second between the last stream's first token and the first stream's end.

    Between these times every stream decodes, so that neither prefill nor shrinking batches affect the
    figure. None if there is no such interval.
    """
    if not traces or any(not trace.arrivals for trace in traces):
        return None
    begin = max(trace.arrivals[0][0] for trace in traces)
    end = min(trace.arrivals[-1][0] for trace in traces)
    if end <= begin:
        return None
    return sum(count for trace in traces for now, count in trace.arrivals if begin < now <= end) / (
        end - begin
    )


def summarize(rounds: Sequence[Sequence[Trace]], *, together: bool = True) -> Summary:
    """The figures of all rounds. Without `together` there is no decode rate."""
    traces = [trace for one in rounds for trace in one]
    done = [trace.finished for trace in traces if trace.finished]
    duration_s = max(t.ended for t in traces) - min(t.started for t in traces) if traces else 0.0
    tokens = sum(trace.tokens for trace in traces)
    rates = [rate for one in rounds if together and (rate := decode_rate(one)) is not None]
    return Summary(
        requests=len(traces),
        tokens=tokens,
        duration_s=duration_s,
        tokens_per_s=tokens / duration_s if duration_s > 0 else 0.0,
        decode_tokens_per_s=statistics.median(rates) if rates else None,
        ttft_ms=Percentiles.of([t.first_token_s * 1e3 for t in traces if t.first_token_s is not None]),
        itl_ms=Percentiles.of([gap * 1e3 for trace in traces for gap in trace.gaps_s()]),
        queue_ms=Percentiles.of([float(finished.usage.queue_ms) for finished in done]),
        cached_tokens=sum(finished.usage.cached_tokens for finished in done),
        preemptions=sum(finished.usage.preemptions for finished in done),
    )


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of each stream. Prompts are random token ids, so that no prefix is shared or cached.

    With `repeats` above 1, a prompt repeats one passage that often; most models then continue it.
    """

    prompt_tokens: int
    new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    salt: str = ""  # cache_salt: a new one for each run excludes prefix hits from earlier runs
    repeats: int = 1

    def prompt(self, model: ModelInfo, number: int) -> list[int]:
        """Token ids of the prompt of request `number`; a function of seed, number and vocabulary."""
        source, ends = random.Random(f"{self.seed}/{number}"), frozenset(model.eos_token_ids)
        ids: list[int] = []
        passage = -(-self.prompt_tokens // self.repeats)
        while len(ids) < passage:
            if (token := source.randrange(model.vocab_size)) not in ends:
                ids.append(token)
        return (ids * self.repeats)[: self.prompt_tokens]


async def stream(
    client: aio.Client,
    load: Load,
    prompt: Sequence[int],
    timeout_s: float | None,
    on_tokens: Callable[[int], None] = lambda _: None,
    speculation: Speculation | None = None,
) -> Trace:
    """Run one stream to its end. `on_tokens` gets each delta's number of tokens. Raises paceline.errors."""
    trace = Trace(started=time.perf_counter())
    options: Options = {
        "max_tokens": load.new_tokens,
        "temperature": load.temperature,
        "top_p": load.top_p,
        "seed": load.seed,
        "cache_salt": load.salt,
        "ignore_eos": True,
    }
    if speculation is not None:
        options["speculation"] = speculation
    async with client.generate(token_ids=prompt, timeout_s=timeout_s, **options) as generation:
        async for event in generation:
            trace.record(event, time.perf_counter())
            if isinstance(event, Delta):
                on_tokens(len(event.token_ids))
    return trace


async def run_rounds(
    client: aio.Client,
    model: ModelInfo,
    load: Load,
    *,
    concurrency: int,
    rounds: int,
    together: bool,
    timeout_s: float | None,
    on_tokens: Callable[[int], None] = lambda _: None,
    first_number: int = 0,
    speculation: Speculation | None = None,
) -> list[list[Trace]]:
    """A closed loop: `concurrency` clients, each sending `rounds` requests one after another.

    With `together`, a round starts when all streams of the round before have ended, so that each round has
    a decode rate; otherwise the clients do not wait for each other. Returns the traces of each round; without
    `together` all traces as one.
    """

    async def one(worker: int, turn: int) -> Trace:
        prompt = load.prompt(model, first_number + turn * concurrency + worker)
        return await stream(client, load, prompt, timeout_s, on_tokens, speculation)

    async def one_round(turn: int) -> list[Trace]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(worker, turn)) for worker in range(concurrency)]
        return [task.result() for task in tasks]

    async def one_worker(worker: int) -> list[Trace]:
        return [await one(worker, turn) for turn in range(rounds)]

    if together:
        return [await one_round(turn) for turn in range(rounds)]
    async with asyncio.TaskGroup() as group:
        workers = [group.create_task(one_worker(worker)) for worker in range(concurrency)]
    return [[trace for task in workers for trace in task.result()]]
