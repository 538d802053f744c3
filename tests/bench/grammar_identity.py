"""Constrained output of the default model under everything that must not change it: 40 runs.

usage: python -m tests.bench.grammar_identity [--dtype int8]

Each run asks eight questions at once, with JSON schemas, regular expressions, choices and Lark grammars,
greedy and sampled, of one completion and several. Answers must be those of the same question asked alone,
without drafts: ids, text, logprobs and ends. A run has one of four drafters, one or two steps in flight, and
one of five circumstances: a large pool, prompts in chunks of eight tokens, a pool barely larger than one
request, both, and an executor that is killed while objects are open. Prints for each run what happened in it,
and what should have and did not; exit status 1 if an answer differs or if something has never happened.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline import aio
from paceline.types import Completion, Drafter, Speculation

from tests.grammars.questions import QUESTIONS, GrammarQuestion
from tests.model.default_model import default_model
from tests.support.altering_proxy import altering_proxy
from tests.support.first_layers import write_first_layers
from tests.support.grammar_steps import GrammarSteps
from tests.support.held_streams import essence
from tests.support.mid_object import RESTART_S, kill_amid
from tests.support.stack import Stack, eventually

PAGE_SIZE, LARGE_POOL, DRAFT_LAYERS = 16, 1024, 8
CHUNK_TOKENS = 256  # more than any prompt has
AT_ONCE = 8


@dataclass(frozen=True)
class Circumstances:
    """What a run's stack is like."""

    name: str
    tight: bool = False  # a pool barely larger than one request
    chunk_tokens: int = CHUNK_TOKENS
    kills: bool = False


CIRCUMSTANCES = (
    Circumstances("large"),
    Circumstances("chunks", chunk_tokens=8),
    Circumstances("tight", tight=True),
    Circumstances("tight, chunks", tight=True, chunk_tokens=8),
    Circumstances("kill", kills=True),
)
DEPTHS = (1, 2)  # steps in flight
DRAFTERS: dict[str, Sequence[Speculation]] = {
    "off": [Speculation("off")],
    "n-gram": [Speculation(3, Drafter.NGRAM), Speculation("auto", Drafter.NGRAM)],
    "grammar": [Speculation(8, Drafter.GRAMMAR), Speculation("auto", Drafter.GRAMMAR)],
    "draft executor": [Speculation(3, Drafter.DRAFT_EXECUTOR), Speculation("auto", Drafter.DRAFT_EXECUTOR)],
}
"""By turns. Only with "auto" are there tokens without drafts, which can be computed ahead of answers."""
Answers = list[list[Completion]]


@dataclass
class Run:
    """One run, and what came of it."""

    number: int
    circumstances: Circumstances
    depth: int
    drafter: str
    counts: Counter[str]
    wrong: list[int]  # questions

    @property
    def wanted(self) -> list[str]:
        """What should have happened in it."""
        found = ["forks"]
        found += ["two in flight", "ahead"] if self.depth > 1 else []
        found += ["chunks"] if self.circumstances.chunk_tokens < CHUNK_TOKENS else []
        found += ["preemptions", "replays"] if self.circumstances.tight else []
        found += ["kills", "replays"] if self.circumstances.kills else []
        found += [f"{self.drafter} accepted"] if self.drafter != "off" else []
        return found

    def __str__(self) -> str:
        counts = ", ".join(f"{self.counts[name]} {name}" for name in sorted(self.counts) if self.counts[name])
        missing = [name for name in self.wanted if not self.counts[name]]
        setting = f"{self.circumstances.name:13s} {self.depth} in flight, {self.drafter:14s}"
        return (
            f"{self.number:2d} {setting}: {counts}"
            + (f"; DID NOT HAPPEN: {', '.join(missing)}" if missing else "")
            + (f"; WRONG: questions {self.wrong}" if self.wrong else "")
        )


class Bench:
    """The executors, and the answers of questions asked alone."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self.stack = Stack(directory)
        self._flags = ["--backend", "torch", "--dtype", dtype, "--page-size", str(PAGE_SIZE)]
        self._large = self._start(default_model(), LARGE_POOL)
        self._tight = ""
        write_first_layers(default_model(), directory / "first", DRAFT_LAYERS)
        self.stack.drafts.append(self._start(directory / "first", LARGE_POOL))
        self._alone: Answers = []
        self._numbers = itertools.count()

    def _start(self, model: Path, pages: int) -> str:
        return self.stack.start_executor(*self._flags, "--model", str(model), "--pages", str(pages))

    async def ask_alone(self) -> None:
        """All questions, one after another; then start the executor with a pool for the largest of them."""
        self.stack.start_scheduler(executors=[self._large])
        await asyncio.to_thread(self.stack.scheduler.wait_serving)
        largest = 0
        async with self.stack.client() as client:
            for question in QUESTIONS:
                answer = await question.ask(client, speculation="off").collect()
                self._alone.append([essence(one) for one in answer])
                prompt_tokens = answer[0].finished.usage.prompt_tokens if answer[0].finished else 0
                largest = max(largest, prompt_tokens + int(question.options["max_tokens"]))
                print("   ", [one.text for one in answer])
        self.stack.scheduler.terminate()
        self._tight = self._start(default_model(), -(-largest // PAGE_SIZE) + 1)

    async def runs(self, circumstances: Circumstances, depth: int) -> list[Run]:
        """A run for each drafter, on a scheduler of their own."""
        address = self._tight if circumstances.tight else self._large
        found = []
        async with altering_proxy(address) as proxy:
            flags = ["--prefill-chunk-tokens", str(circumstances.chunk_tokens)]
            flags += ["--steps-in-flight", str(depth), "--failover-timeout-s", str(RESTART_S)]
            self.stack.start_scheduler(*flags, executors=[proxy.address])
            await asyncio.to_thread(self.stack.scheduler.wait_serving)
            async with self.stack.client() as client:

                async def drafts() -> bool:
                    return any(one.draft and one.connected for one in await client.executors())

                await eventually(drafts, "the draft executor is not taken")
                for drafter in DRAFTERS:
                    run = Run(next(self._numbers), circumstances, depth, drafter, Counter(), [])
                    steps = GrammarSteps(proxy)
                    await self._run(run, client, address)
                    run.counts += steps.counts
                    found.append(run)
                    print(run, flush=True)
            await asyncio.to_thread(self.stack.scheduler.terminate)
        return found

    async def _run(self, run: Run, client: aio.Client, address: str) -> None:
        places = [(3 * run.number + place) % len(QUESTIONS) for place in range(AT_ONCE)]
        streams: list[tuple[GrammarQuestion, aio.Generation]] = []
        for place, speculation in zip(places, itertools.cycle(DRAFTERS[run.drafter]), strict=False):
            # A salt of its own, so that the prompt is computed and not found.
            more = {"speculation": speculation, "cache_salt": f"run {run.number}"}
            streams.append((QUESTIONS[place], QUESTIONS[place].ask(client, **more)))
        before = (await client.status()).preemptions
        if run.circumstances.kills:
            target = next(i for i, (question, _) in enumerate(streams) if question.is_object)
            tokens = sum(len(one.token_ids) for one in self._alone[places[target]])
            kill = await kill_amid(
                self.stack, address, client, streams, target, 1 + tokens * (run.number % 7) // 10
            )
            answers, run.counts["kills"] = kill.answers, int(bool(kill.tokens))
            run.counts["objects open at the kill"] = len(kill.tokens)
        else:
            answers = await asyncio.gather(*(generation.collect() for _, generation in streams))
        run.counts["preemptions"] = (await client.status()).preemptions - before
        self._judge(run, places, answers)

    def _judge(self, run: Run, places: Sequence[int], answers: Answers) -> None:
        for place, answer in zip(places, answers, strict=True):
            if [essence(one) for one in answer] != self._alone[place]:
                run.wrong.append(place)
            for one in answer:
                assert one.finished is not None
                usage = one.finished.usage
                by_grammar = usage.grammar_accepted_tokens
                run.counts["completions"] += 1
                run.counts["tokens"] += usage.completion_tokens
                run.counts["grammar accepted"] += by_grammar
                run.counts[f"{run.drafter} accepted"] += usage.accepted_tokens - by_grammar
                run.counts["rejected"] += usage.drafted_tokens - usage.accepted_tokens


async def bench(directory: Path, dtype: str) -> bool:
    """Do all runs; returns whether all is well."""
    began_s = time.monotonic()
    one = Bench(directory, dtype)
    try:
        await one.ask_alone()
        runs = []
        for circumstances, depth in itertools.product(CIRCUMSTANCES, DEPTHS):
            runs += await one.runs(circumstances, depth)
    finally:
        one.stack.kill()
    counts, wanted = Counter[str](), set[str]()
    for run in runs:
        counts += run.counts
        wanted |= set(run.wanted)
    never = sorted(name for name in wanted if not counts[name])
    wrong = [run.number for run in runs if run.wrong]
    incomplete = [run.number for run in runs if any(not run.counts[name] for name in run.wanted)]
    print(f"\n{len(runs)} runs in {time.monotonic() - began_s:.0f} s, {dtype}:")
    print("  ", ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    print(f"   differ from what they are alone: {wrong or 'none'}")
    print(f"   something wanted did not happen in: {incomplete or 'none'}; in no run: {never or 'nothing'}")
    return not (wrong or never)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="int8")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        sys.exit(not asyncio.run(bench(Path(directory), args.dtype)))


if __name__ == "__main__":
    main()
