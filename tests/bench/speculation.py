"""Decode speed with speculation beside plain decoding, on copying tasks and on free chat.

usage: python -m tests.bench.speculation [ADDRESS] [--kinds copying,chat] [--streams 1,4,8,16,32]
           [--pairs 5] [--new 64] [--json FILE] [--check]

Without ADDRESS it starts a stack of its own with the default model in fp32. The prompts are those of
tests/bench/prompts: the answers to `copying` (repeat with edits, quotes, code with small changes) are mostly
in their prompts, those to `chat` are not; all are long enough that no stream ends before --new tokens.

A pair is one run of each mode over the same prompts, in an order that alternates from pair to pair, so a
drifting machine cancels in a pair's ratios. In a run N clients take prompts from one queue, and the run is
measured until the first of them finds it empty. The rate is N times the tokens after each answer's first
ones, divided by the time that they took: decoding alone, at that concurrency. Greedy, and every answer must
be the one of the first plain run, token by token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paceline import aio
from paceline.chat import Message
from paceline.types import Delta, Drafter, Finished, Speculation, Usage

from tests.model.default_model import default_model
from tests.support.stack import oracle_stack

PLAIN, AUTOMATIC = "plain", "automatic"
MODES = {
    PLAIN: Speculation("off"),
    AUTOMATIC: Speculation("auto"),
    "n-gram 4": Speculation(4, Drafter.NGRAM),
    "n-gram 8": Speculation(8, Drafter.NGRAM),
}
PROMPTS_OF_A_RUN = {1: 6, 4: 10, 8: 16, 16: 24, 32: 40}
"""By concurrency, so that a run takes some seconds."""
LEAST = 0.97
LEAST_ALONE = {"copying": 2.0, "chat": 1.0}
"""Goals: the median ratio of automatic to plain at any concurrency, and at 1 stream."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task of the corpus."""

    name: str
    messages: tuple[Message, ...]


@dataclass(slots=True)
class Run:
    """One mode over some prompts."""

    tokens_per_s: float
    seconds: float
    usages: list[Usage] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Figure:
    """One mode at one concurrency; ratios are to plain decoding of the same pair."""

    kind: str
    streams: int
    mode: str
    tokens_per_s: float  # median
    ratio: float  # median
    ratio_least: float
    ratio_most: float
    pairs: int
    run_s: float  # median
    acceptance: float | None  # of the drafts; None: there were none
    tokens_per_verification: float | None


def read_prompts(kind: str) -> list[Prompt]:
    """A corpus: a JSON line per task, with its name and its messages."""
    lines = (Path(__file__).parent / "prompts" / f"{kind}.jsonl").read_text().splitlines()
    tasks = [json.loads(line) for line in lines]
    return [Prompt(task["name"], tuple(Message(**m) for m in task["messages"])) for task in tasks]


class Bench:
    """Runs against one scheduler."""

    def __init__(self, client: aio.Client, new_tokens: int) -> None:
        self._client = client
        self._new = new_tokens
        self._answers: dict[str, list[int]] = {}  # by prompt, of the first run

    async def run(self, prompts: Sequence[Prompt], streams: int, mode: str) -> Run:
        """All prompts through `streams` clients. Raises RuntimeError at an answer that is another one."""
        queue = iter(prompts)
        began = time.perf_counter()
        ended: list[float] = []
        traces: list[list[tuple[float, int]]] = []
        usages: list[Usage] = []

        async def work() -> None:
            for prompt in queue:
                arrivals: list[tuple[float, int]] = []
                traces.append(arrivals)
                usages.append(await self._answer(prompt, mode, arrivals))
            ended.append(time.perf_counter())

        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(work())
        tokens, seconds = 0, 0.0
        for arrivals in traces:
            counted = [arrival for arrival in arrivals if arrival[0] <= ended[0]]
            if len(counted) > 1:
                tokens += sum(count for _, count in counted[1:])
                seconds += counted[-1][0] - counted[0][0]
        return Run(streams * tokens / seconds, ended[0] - began, usages)

    async def _answer(self, prompt: Prompt, mode: str, arrivals: list[tuple[float, int]]) -> Usage:
        ids: list[int] = []
        usage: Usage | None = None
        async for event in self._client.generate(
            messages=prompt.messages, max_tokens=self._new, temperature=0.0, speculation=MODES[mode]
        ):
            if isinstance(event, Delta) and event.token_ids:
                arrivals.append((time.perf_counter(), len(event.token_ids)))
                ids += event.token_ids
            elif isinstance(event, Finished):
                usage = event.usage
        if usage is None or self._answers.setdefault(prompt.name, ids) != ids:
            raise RuntimeError(f"{prompt.name}: {mode} gave another answer than plain decoding")
        return usage


async def measure(
    bench: Bench, kind: str, prompts: Sequence[Prompt], streams: int, modes: Sequence[str], pairs: int
) -> list[Figure]:
    """Pairs of all modes; each pair goes on in the corpus where the one before it ended."""
    size = PROMPTS_OF_A_RUN.get(streams, 2 * streams)
    await bench.run(prompts[:streams], streams, AUTOMATIC)  # a controller that has seen this concurrency
    runs: dict[str, list[Run]] = {mode: [] for mode in modes}
    for pair in range(pairs):
        chosen = [prompts[i % len(prompts)] for i in range(pair * size, (pair + 1) * size)]
        for mode in modes if pair % 2 == 0 else reversed(modes):
            run = await bench.run(chosen, streams, mode)
            runs[mode].append(run)
            told = f"{kind}, {streams} streams, pair {pair + 1}/{pairs}, {mode}: {run.tokens_per_s:.1f} tok/s"
            print(told, file=sys.stderr, flush=True)
    return [figure(kind, streams, mode, runs[mode], runs[PLAIN]) for mode in modes]


def figure(kind: str, streams: int, mode: str, runs: Sequence[Run], plain: Sequence[Run]) -> Figure:
    """What the runs of one mode come to."""
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(runs, plain, strict=True)]
    usages = [usage for run in runs for usage in run.usages]
    drafted = sum(usage.drafted_tokens for usage in usages)
    accepted = sum(usage.accepted_tokens for usage in usages)
    verifications = sum(usage.verifications for usage in usages)
    return Figure(
        kind=kind,
        streams=streams,
        mode=mode,
        tokens_per_s=statistics.median(run.tokens_per_s for run in runs),
        ratio=statistics.median(ratios),
        ratio_least=min(ratios),
        ratio_most=max(ratios),
        pairs=len(runs),
        run_s=statistics.median(run.seconds for run in runs),
        acceptance=accepted / drafted if drafted else None,
        tokens_per_verification=1 + accepted / verifications if verifications else None,
    )


def missed(figures: Sequence[Figure]) -> list[str]:
    """The goals that were not reached, compared with two decimals."""
    faults = []
    for one in figures:
        goal = LEAST_ALONE.get(one.kind, LEAST) if one.streams == 1 else LEAST
        if one.mode == AUTOMATIC and round(one.ratio, 2) < goal:
            faults.append(f"{one.kind}, {one.streams} streams: {one.ratio:.2f} of plain, the goal is {goal}")
    return faults


def table(figures: Sequence[Figure]) -> str:
    """The figures for people."""
    lines = [
        f"{'kind':8} {'streams':>7} {'mode':10} {'tok/s':>7} {'to plain':>8} {'min..max':>12} "
        f"{'accepted':>8} {'per check':>9}"
    ]
    for one in figures:
        accepted = "" if one.acceptance is None else f"{one.acceptance:.0%}"
        each = "" if one.tokens_per_verification is None else f"{one.tokens_per_verification:.2f}"
        lines.append(
            f"{one.kind:8} {one.streams:7} {one.mode:10} {one.tokens_per_s:7.1f} {one.ratio:8.2f} "
            f"{f'{one.ratio_least:.2f}..{one.ratio_most:.2f}':>12} {accepted:>8} {each:>9}"
        )
    return "\n".join(lines)


@contextmanager
def own_stack() -> Iterator[str]:
    """The default model in fp32 behind a scheduler; its address."""
    executor = ["--backend", "torch", "--model", str(default_model()), "--dtype", "float32"]
    with tempfile.TemporaryDirectory() as scratch, oracle_stack(Path(scratch), executor=executor) as stack:
        yield stack.scheduler.address


async def bench_all(address: str, args: argparse.Namespace) -> list[Figure]:
    """Everything that was asked for."""
    figures: list[Figure] = []
    async with aio.Client(address) as client:
        for kind in args.kinds.split(","):
            bench, prompts = Bench(client, args.new), read_prompts(kind)
            # The right answers, and all prompts in the prefix cache.
            await bench.run(prompts, 8, PLAIN)
            for streams in map(int, args.streams.split(",")):
                modes = list(MODES) if streams == 1 else [PLAIN, AUTOMATIC]
                figures += await measure(bench, kind, prompts, streams, modes, args.pairs)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", nargs="?", help="of a scheduler; default: start one")
    parser.add_argument("--kinds", default="copying,chat")
    parser.add_argument("--streams", default="1,4,8,16,32")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a goal is missed")
    args = parser.parse_args()
    if args.address:
        figures = asyncio.run(bench_all(args.address, args))
    else:
        with own_stack() as address:
            figures = asyncio.run(bench_all(address, args))
    print(table(figures))
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in figures], indent=2) + "\n")
    faults = missed(figures)
    print("\n".join(faults) or "all goals reached")
    if args.check and faults:
        sys.exit(1)


if __name__ == "__main__":
    main()
