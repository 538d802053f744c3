"""The same tokens whatever happens to a request: any model, real processes, ten circumstances.

usage: python -m tests.bench.exactness [MODEL] [-E NAME=VALUE]... [--draft MODEL] [--prompts 8] [--new 64]

MODEL: a directory, a GGUF file, or a tiny random model by its name in `tests.model.tiny`, or `mxfp4` (gpt-oss
with experts in blocks); default: the default model. -E: a setting of its executor, as in -E dtype=int8.
--draft: what drafts; default: MODEL in another dtype, whose drafts are nearly always accepted.

The prompts are random ids with repeated parts, of which drafts can be made; every second request is sampled.
Each is asked alone first, without drafts. Then all at once, and the ids must be the same: in a batch, with
prompts in chunks of seven tokens, with drafts of n-grams and of a draft executor, with pages for little more
than one request, on an executor that is killed amid the answers, from a scheduler that is killed (the other
one continues), with prompts that are in the prefix cache, and with most of that together. Exit status 1 if
ids differ, or if what a circumstance is about did not happen. Logprobs are compared too: where rows depend on
their batch they may differ in the last bits.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline import aio
from paceline.collector import Collector
from paceline.types import Completion, Delta, Drafter, Speculation

from tests.model.default_model import default_model
from tests.support.stack import Stack, eventually

PAGE_SIZE, LARGE_POOL, CHUNK_TOKENS = 16, 512, 7
RESTART_S = 600.0  # in which an executor loads its model on a busy machine
OFF, NGRAM, DRAFTED = (
    Speculation("off"),
    Speculation(4, Drafter.NGRAM),
    Speculation(4, Drafter.DRAFT_EXECUTOR),
)
SHORTEST, LONGEST = 20, 120  # tokens of a prompt


@dataclass(frozen=True)
class Circumstances:
    """What befalls the requests of a run; `fact`: what must have happened, a key of `Run.facts`."""

    name: str
    fact: str
    speculation: Sequence[Speculation] = (OFF,)  # by turns
    tight: bool = False  # a pool for little more than one request
    chunk_tokens: int = 0
    kill: str = ""  # executor or scheduler, amid the answers
    again: bool = False  # the prompts of the run before


CIRCUMSTANCES = (
    Circumstances("prefix hit", "cached tokens", again=True),
    Circumstances("batched", "steps shared"),
    Circumstances("in chunks", "steps for chunks", chunk_tokens=CHUNK_TOKENS),
    Circumstances("n-gram drafts", "drafts accepted", (NGRAM,)),
    Circumstances("draft executor", "drafts accepted", (DRAFTED,)),
    Circumstances("executor killed", "streams interrupted", kill="executor"),
    Circumstances("continued elsewhere", "streams continued", kill="scheduler"),
    Circumstances("preempted", "preemptions", tight=True),
    Circumstances(
        "together",
        "preemptions",
        (NGRAM, DRAFTED, OFF),
        tight=True,
        chunk_tokens=CHUNK_TOKENS,
        kill="executor",
    ),
)


@dataclass
class Run:
    """The answers of one run, and how often what happened in it."""

    answers: list[Completion]
    facts: dict[str, int]


class Bench:
    """An executor, one that drafts, and schedulers that live as long as their run."""

    def __init__(
        self, stack: Stack, model: Path, draft: Path, settings: dict[str, str], *, count: int, new: int
    ) -> None:
        self.stack, self._count, self._new = stack, count, new
        self._flags = ["--backend", "torch", "--page-size", str(PAGE_SIZE)]
        own = [flag for name, value in settings.items() for flag in (f"--{name}", value)]
        self._serving = [*self._flags, "--model", str(model), *own]
        self._other_dtype = "float32" if settings.get("dtype") == "int8" else "int8"
        self._draft = draft
        self.executor = self.stack.start_executor(*self._serving, "--pages", str(LARGE_POOL))
        self._pools, self._salt = {False: LARGE_POOL, True: 0}, "alone"
        self._tight = False

    async def run(self, wanted: Sequence[str]) -> bool:
        """All circumstances; whether the ids were the same and what had to happen did."""
        self.stack.start_scheduler()
        await asyncio.to_thread(self.stack.scheduler.wait_serving)
        async with self.stack.client() as client:
            vocabulary = (await client.model_info()).vocab_size
            self._prompts = prompts(self._count, vocabulary)
            largest = max(map(len, self._prompts)) + self._new
            self._pools[True] = -(-largest // PAGE_SIZE) + 2
            alone = [await collected(self._ask(client, at, OFF)) for at in range(self._count)]
        self.stack.scheduler.kill()
        drafting = [*self._flags, "--model", str(self._draft), "--dtype", self._other_dtype]
        self.stack.drafts.append(self.stack.start_executor(*drafting, "--pages", str(LARGE_POOL)))
        good = True
        for circumstances in CIRCUMSTANCES:
            if not wanted or circumstances.name in wanted:
                good &= report(circumstances, alone, await self._in(circumstances))
        return good

    def _ask(self, client: aio.Client, at: int, speculation: Speculation) -> aio.Generation:
        return client.generate(
            token_ids=self._prompts[at],
            max_tokens=self._new,
            temperature=(0.0, 0.9)[at % 2],
            seed=at,
            ignore_eos=True,
            logprobs=0,
            returns="token_ids",
            cache_salt=self._salt,
            speculation=speculation,
        )

    async def _in(self, circumstances: Circumstances) -> Run:
        if circumstances.tight != self._tight:
            self._tight = circumstances.tight
            pages = self._pools[self._tight]
            await asyncio.to_thread(
                self.stack.change_executor, self.executor, *self._serving, "--pages", str(pages)
            )
        if not circumstances.again:
            self._salt = circumstances.name
        flags = ["--failover-timeout-s", str(RESTART_S)]
        if circumstances.chunk_tokens:
            flags += ["--prefill-chunk-tokens", str(circumstances.chunk_tokens)]
        started = []
        for _ in range(2 if circumstances.kill == "scheduler" else 1):
            self.stack.start_scheduler(*flags, executors=[self.executor])
            started.append(self.stack.scheduler)
        try:
            for one in started:
                await asyncio.to_thread(one.wait_serving)
            async with aio.Client([one.address for one in started]) as client:
                if DRAFTED in circumstances.speculation:
                    await eventually(lambda: drafts(client), "the draft executor is not taken", RESTART_S)
                kills = {"executor": self.stack.executor(self.executor).kill, "scheduler": started[0].kill}
                return await self._ask_all(client, circumstances, kills.get(circumstances.kill))
        finally:
            for one in started:
                one.kill()

    async def _ask_all(
        self, client: aio.Client, circumstances: Circumstances, kill: Callable[[], None] | None
    ) -> Run:
        """All prompts at once. Kills when all have had a token, or with a tight pool the first of them."""
        cycle = circumstances.speculation
        streams = [self._ask(client, at, cycle[at % len(cycle)]) for at in range(self._count)]
        begun = [asyncio.Event() for _ in streams]
        reads = [
            asyncio.create_task(collected(one, event.set)) for one, event in zip(streams, begun, strict=True)
        ]
        interrupted = 0
        if kill:
            for event in begun[:1] if circumstances.tight else begun:
                await event.wait()
            kill()
            interrupted = sum(not one.done() for one in reads)
            if circumstances.kill == "executor":
                await asyncio.to_thread(self.stack.restart_executor, self.executor)
        answers = list(await asyncio.gather(*reads))
        status = await client.status()
        usages = [one.finished.usage for one in answers if one.finished]
        facts = {
            "cached tokens": sum(one.cached_tokens for one in usages),
            "steps shared": self._count * self._new - status.steps,
            "steps for chunks": status.steps - self._new - self._count,  # a batch without needs fewer
            "drafts accepted": sum(one.accepted_tokens for one in usages),
            "drafts rejected": sum(one.drafted_tokens - one.accepted_tokens for one in usages),
            "preemptions": status.preemptions,
            "streams interrupted": interrupted,
            "streams continued": sum(one.resumptions for one in streams),
        }
        return Run(answers, facts)


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Random ids, a part of which comes again and again."""
    rng = random.Random(5)
    found = []
    for at in range(count):
        part = [rng.randrange(3, vocabulary) for _ in range(rng.randint(5, 30))]
        length = SHORTEST + at * (LONGEST - SHORTEST) // max(count - 1, 1)
        found.append([rng.randrange(3, vocabulary), *part * (length // len(part) + 1)][:length])
    return found


async def drafts(client: aio.Client) -> bool:
    """Whether the scheduler has an executor that drafts."""
    return any(one.draft and one.connected for one in await client.executors())


async def collected(generation: aio.Generation, on_tokens: Callable[[], None] = lambda: None) -> Completion:
    """The one completion; calls `on_tokens` whenever there are new ones."""
    collector = Collector()
    async for event in generation:
        collector.add(event)
        if isinstance(event, Delta):
            on_tokens()
    return collector.completions()[0]


def report(circumstances: Circumstances, alone: Sequence[Completion], run: Run) -> bool:
    """Print a line; whether all is well."""
    pairs = list(zip(alone, run.answers, strict=True))
    wrong = [at for at, (one, other) in enumerate(pairs) if one.token_ids != other.token_ids]
    gaps = [
        abs(a.logprob - b.logprob)
        for one, other in pairs
        for a, b in zip(one.logprobs, other.logprobs, strict=False)
    ]
    happened = run.facts[circumstances.fact] > 0
    facts = ", ".join(f"{count} {name}" for name, count in run.facts.items() if count > 0)
    print(
        f"{circumstances.name:20s} {len(pairs) - len(wrong)} of {len(pairs)} identical, logprobs differ by "
        f"{max(gaps, default=float('nan')):.1e} at most; {facts}"
        + (f"; WRONG: prompts {wrong}" if wrong else "")
        + ("" if happened else f"; DID NOT HAPPEN: {circumstances.fact}"),
        flush=True,
    )
    return happened and not wrong


def written(name: str, directory: Path) -> Path:
    """The model of this name, or path."""
    if Path(name).exists():
        return Path(name)
    from tests.model.quantized import test_mxfp4 as mxfp4
    from tests.model.tiny import save

    mxfp4.write(directory) if name == "mxfp4" else save(name, directory)
    return directory


def exact(
    model: Path,
    directory: Path,
    settings: dict[str, str],
    *,
    draft: Path | None = None,
    count: int = 8,
    new: int = 64,
    only: Sequence[str] = (),
) -> bool:
    """All circumstances, or `only` some of them; whether all is well."""
    stack = Stack(directory)
    try:
        return asyncio.run(Bench(stack, model, draft or model, settings, count=count, new=new).run(only))
    finally:
        stack.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("-E", dest="settings", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--only", action="append", default=[], help="a circumstance; repeat it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, suppress(KeyboardInterrupt):
        model = written(args.model, Path(scratch) / "model") if args.model else default_model()
        settings = dict(one.split("=", 1) for one in args.settings)
        good = exact(
            model,
            Path(scratch),
            settings,
            draft=args.draft,
            count=args.prompts,
            new=args.new,
            only=args.only,
        )
        print("exact" if good else "NOT EXACT")
        sys.exit(not good)


if __name__ == "__main__":
    main()
