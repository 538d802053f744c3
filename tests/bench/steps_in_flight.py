"""How much of the time an executor idles between two steps, by the number of steps in flight.

    python -m tests.bench.steps_in_flight [--cases 2:1,2:32,10:256] [--depths 1,2] [--seconds 5] [--check]
                                          [--generate] [--clock] [--speculation 4]

A case is milliseconds of a step and sequences. The executor is the oracle in a process of its own, with
that step time; the scheduler's loop runs here, with its core and a real link, and drops what it is told
to deliver. With --generate the requests go through a scheduler process and its public Generate instead.
Idle is what the executor did not compute of the time between the first and the last answer, all
sequences decoding. Tokens are compared between the depths. --check fails above 5 % at a depth of two or more.

With --clock the executor's device is a clock instead, and the host's part of CUDA steps is real: the device's
share is the step time by the time from one step to the next, by the mean and by the median. Depth 0 is what
the scheduler chooses itself. With --speculation each sequence has so many n-gram drafts in each step where it
has any; the clock, which picks one token all the time, accepts them. --clock needs the triton extra.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from paceline import Drafter, Speculation, aio
from paceline.channel import PLAINTEXT

from scheduler_service.config import SchedulerSettings
from scheduler_service.core.events import Event, Tokens
from scheduler_service.core.request import DraftingWish, DraftSource, Request, SamplingSettings
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.link.drafts import DraftPool
from scheduler_service.link.pool import ExecutorPool
from scheduler_service.loop.draft_loop import DraftLoop
from scheduler_service.loop.loop import Loop
from scheduler_service.loop.wake import Wake
from scheduler_service.text.pool import TextPool
from tests.support.stack import oracle_stack

GOAL = 0.05
PROMPT = 8  # tokens
SETTLE = 10  # steps at the beginning and at the end that are left out

Outputs = dict[tuple[str, int], list[int]]


class Sink:
    """Takes the loop's events instead of streams, and its step times instead of metrics."""

    def __init__(self) -> None:
        self.tokens: Outputs = defaultdict(list)
        self.steps: list[tuple[float, float, int]] = []  # answered at, computed for, rows

    def __len__(self) -> int:
        return 1

    def post(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                self.tokens[event.request_id, event.index] += event.ids

    def deliver(self) -> None: ...

    def step(self, elapsed_s: float, compute_s: float, rows: int) -> None:
        self.steps.append((time.perf_counter(), compute_s, rows))


@dataclass
class Outcome:
    """Of one case at one depth."""

    idle: float
    step_s: float  # from one step to the next: the mean
    median_step_s: float
    tokens: Outputs = field(repr=False)


async def at_the_loop(
    address: str,
    depth: int,
    sequences: int,
    seconds: float,
    *,
    prompt: int = PROMPT,
    temperature: float = 1.0,
    step_tokens: int = 512,
    speculation: int = 0,
) -> Outcome:
    """Drive the executor by the loop alone."""
    settings = SchedulerSettings(executor=(address,), steps_in_flight=depth, max_step_tokens=step_tokens)
    core, wake, sink = StepScheduler(settings.core), Wake(), Sink()
    text = TextPool(settings.text_limits)
    pool = ExecutorPool(
        settings.executor, PLAINTEXT, settings.timing, settings.request_limits, text, changed=wake.set
    )
    anything: Any = sink  # stands for StreamRegistry and Telemetry
    drafts = DraftLoop(
        core, DraftPool((), PLAINTEXT, settings.timing, lambda: None, wake.set), anything, Wake(), wake.set
    )
    loop = Loop(core, pool, drafts, anything, anything, wake)
    tasks = [asyncio.create_task(part.run()) for part in (text, pool, loop)]
    drafters = frozenset({DraftSource.NGRAM} if speculation else ())
    try:
        while not core.connected:  # noqa: ASYNC110  # the loop's business
            await asyncio.sleep(0.01)
        for i in range(sequences):
            ids = tuple((i + j) % 250 for j in range(prompt))
            sampling = SamplingSettings(temperature=temperature, seed=i)
            wish = DraftingWish(drafters, speculation or None)
            core.add(Request(f"r{i}", ids, sampling, speculation=wish), time.monotonic())
        wake.set()
        await asyncio.sleep(seconds)
        await pool.close_sessions()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    full = [step for step in sink.steps if step[2] == sequences][SETTLE:-SETTLE]
    if len(full) < 2:
        raise RuntimeError(f"{len(sink.steps)} steps in {seconds} s are too few to measure")
    waits = [b[0] - a[0] for a, b in itertools.pairwise(full)]
    idle = 1 - sum(step[1] for step in full[1:]) / sum(waits)
    return Outcome(idle, statistics.mean(waits), statistics.median(waits), sink.tokens)


async def through_generate(
    address: str, executor: str, sequences: int, seconds: float, speculation: int
) -> Outcome:
    """Stream everything to clients in this process; what the executor computed is asked of itself."""
    tokens: Outputs = defaultdict(list)

    async def stream(client: aio.Client, i: int) -> None:
        prompt = [(i + j) % 250 for j in range(PROMPT)]
        wish = Speculation(speculation or "off", Drafter.NGRAM)
        generation = client.generate(
            token_ids=prompt, temperature=1.0, seed=i, ignore_eos=True, speculation=wish
        )
        async for event in generation:
            tokens[f"r{i}", 0] += getattr(event, "token_ids", ())

    async with aio.Client(address) as client, aio.ExecutorClient(executor) as device:
        streams = [asyncio.create_task(stream(client, i)) for i in range(sequences)]
        while len(tokens) < sequences:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        began, before = time.perf_counter(), await device.get_status()
        await asyncio.sleep(seconds)
        ended, after = time.perf_counter(), await device.get_status()
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    took = ended - began
    step_s = took / (after.steps - before.steps)  # of single steps the executor tells nothing
    return Outcome(1 - (after.compute_s - before.compute_s) / took, step_s, step_s, tokens)


@contextlib.contextmanager
def executor(step_ms: float, depth: int | None, module: str) -> Iterator[tuple[str, str]]:
    """Addresses of a scheduler ("" without a depth) and of the executor behind it."""
    flags = ("--step-ms", str(step_ms), "--context-length", "100000", "--pages", "65536")
    with (
        tempfile.TemporaryDirectory() as directory,
        oracle_stack(
            Path(directory),
            executor=flags,
            scheduler=("--steps-in-flight", str(depth or 0)),
            executor_module=module,
        ) as stack,
    ):
        (address,) = stack.addresses
        if depth is None:
            stack.scheduler.kill()
        else:
            stack.scheduler.wait_serving()
        yield "" if depth is None else stack.scheduler.address, address


def one_loop() -> asyncio.Runner:
    """For all runs: what gRPC still has to say would find the loop of the run before closed."""
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def equal(one: Outputs, other: Outputs) -> bool:
    """The same as far as both went."""
    return all(tokens[: len(other[key])] == other[key][: len(tokens)] for key, tokens in one.items())


def main() -> int:
    """Measure and print; exit 1 if tokens differ, or with --check when the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", default="2:1,2:32,10:256", help="milliseconds:sequences")
    parser.add_argument("--depths", default="1,2")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--generate", action="store_true", help="through a scheduler process")
    parser.add_argument("--clock", action="store_true", help="the device is a clock")
    parser.add_argument("--speculation", type=int, default=0, help="n-gram drafts of a row; 0: none")
    parser.add_argument("--check", action="store_true")
    with one_loop() as runner:
        return int(measured(parser.parse_args(), runner))


def measured(arguments: argparse.Namespace, runner: asyncio.Runner) -> bool:
    """Measure and print; whether tokens differ, or with --check the goal is missed."""
    failed, drafts = False, arguments.speculation
    for case in arguments.cases.split(","):
        step_ms, sequences = float(case.split(":")[0]), int(case.split(":")[1])
        first: Outputs | None = None
        for depth in map(int, arguments.depths.split(",")):
            module = "tests.support.clocked_executor" if arguments.clock else "executor_service"
            with executor(step_ms, depth if arguments.generate else None, module) as (scheduler, address):
                run = (
                    through_generate(scheduler, address, sequences, arguments.seconds, drafts)
                    if arguments.generate
                    else at_the_loop(address, depth, sequences, arguments.seconds, speculation=drafts)
                )
                outcome = runner.run(run)
            same = first is None or equal(first, outcome.tokens)
            first = first or outcome.tokens
            failed |= not same or (arguments.check and depth > 1 and outcome.idle >= GOAL)
            print(
                f"steps of {step_ms:g} ms, {sequences} sequences, {depth or 'any'} in flight: "
                f"idle {outcome.idle:.1%}, a step every {outcome.step_s * 1e3:.2f} ms, "
                f"the device's share {step_ms / outcome.step_s / 1e3:.1%}, "
                f"by the median {step_ms / outcome.median_step_s / 1e3:.1%}"
                + ("" if same else ", TOKENS DIFFER"),
                flush=True,
            )
    return failed


if __name__ == "__main__":
    sys.exit(main())
