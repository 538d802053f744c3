"""What the step log costs the scheduler's core: plan + apply with and without it, by turns, in one process.

    python -m tests.bench.log_cost [--rounds 200] [--json FILE]
    python -m tests.bench.log_cost --memory [--requests 100000]

One core has the log for one step, none for another, and one with a reader for a third, in an order that
changes each time; so its objects, their places in memory and other load weigh on all three alike. A round has
12 steps of each kind, and the median of their plan + apply, in CPU time of the thread. Those with a reader
have also a twelfth of what it takes to read and encode 12 steps for one caller, who looks every quarter of a
second at 50 steps a second, as `paceline steps` does. Printed is by how much steps with the log (`log`) and
with a reader (`streamed`) take longer than those of their round without: the mean over all rounds but the
tenth at either end, and its 95 % confidence interval by resampling. Sequences end after 50 to 150 tokens
where others wait, so that 1 in 100 is replaced in each step, and another one comes for each; else they go on.
Before, two cores, one of them without a log, must plan the same 60 steps. Exit status 1 if an interval ends
above 3 % (`log`) or 8 % (`streamed`).

--memory: requests of 4 tokens end, 64 live at a time, in steps of half a second, so that the log forgets the
first ones. Printed is the process's memory, and the log's size by its own count, after each tenth of them.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from pathlib import Path

from service_kit.identity import Identity

from scheduler_service.core import dispatcher
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.events import CompletionEnded
from scheduler_service.core.request import Request, SamplingSettings
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.step import Capacity, PlannedStep, RowAnswer, StepAnswer
from scheduler_service.core.step_log import StepFigures, StepLog
from scheduler_service.rpc.codec.steps import step_log
from tests.bench.figures import Line, report

PAGE_SIZE, PROMPT, STEP_S, LOOK_STEPS = 16, 64, 0.02, 12
READER = Identity("account-0", "token")
SHAPES = {  # rows; waiting sequences; their accounts
    "256 rows": (256, 0, 1),
    "1024 rows": (1024, 0, 1),
    "256 rows, 6000 wait in 1 account": (256, 6000, 1),
    "256 rows, 6000 wait in 1000 accounts": (256, 6000, 1000),
}
MOST_LOG, MOST_STREAMED = 3.0, 8.0  # percent


def nothing(*_: object) -> None:
    """In place of what the log does."""


class NoLog(StepLog):
    """Keeps no step."""

    note = answered = nothing  # type: ignore[assignment]


class NoFigures:
    """In place of a step's figures; takes the counts of its rows. The core itself needs when it was sent."""

    def __init__(self, sent_at: float, *_: object) -> None:
        self.sent_at = sent_at


class Case:
    """A core with its requests."""

    def __init__(self, rows: int, waiting: int, accounts: int, log: StepLog) -> None:
        self._accounts, self._waits, self._added, self._lengths = accounts, waiting > 0, 0, random.Random(7)
        most = 2 * (rows + waiting) * PROMPT + (1 << 16)
        config = CoreConfig(
            max_step_tokens=most,
            prefill_chunk_tokens=most,
            max_running=rows,
            max_queued_tokens=most,
            max_queued_requests=4 * (rows + waiting),  # an account has its share of them
        )
        self.core = core = StepScheduler(config)
        core._pool.log = log
        self._pages, self._now = rows * 4000, 0.0
        core.executor_ready(Capacity(self._pages, PAGE_SIZE, 1 << 20, rows, rows, most), 0.0)
        for _ in range(rows + waiting):
            self._add()

    def _add(self) -> None:
        number = self._added
        self._added += 1
        request = Request(
            f"request-{number}",
            tuple(range(number, number + PROMPT)),
            SamplingSettings(),
            max_tokens=self._lengths.randrange(50, 150) if self._waits else 100_000,
            identity=f"account-{number % self._accounts}",
        )
        self.core.add(request, self._now)

    def log(self, log: StepLog) -> None:
        """Use this log from now on; without one, steps have no figures either."""
        self.core._pool.log = log
        vars(dispatcher)["StepFigures"] = NoFigures if isinstance(log, NoLog) else StepFigures

    def step(self) -> tuple[PlannedStep, float]:
        """One step, and the seconds of plan + apply. For each request that ends another one comes."""
        began = time.thread_time()
        plan = self.core.plan(self._now)
        planned = time.thread_time()
        assert plan is not None
        answer = answer_to(plan, self._pages)
        self._now += STEP_S
        resumed = time.thread_time()
        events = self.core.apply(answer, self._now)
        took = planned - began + time.thread_time() - resumed
        for event in events:
            if isinstance(event, CompletionEnded):
                self._add()
        return plan, took

    def stream(self, first: int) -> float:
        """Read and encode the steps from `first` on; seconds for each."""
        log, began, steps = self.core.log, time.thread_time(), self.core.log.end - first
        while (part := log.read(first, len(log))) is not None:
            step_log(part, 0, READER, 0.0).SerializeToString()
            first = part.first_step + len(part)
        return (time.thread_time() - began) / steps


def answer_to(plan: PlannedStep, pages: int) -> StepAnswer:
    """Every row gets a token."""
    rows = [RowAnswer(row.kv_length + max(1, row.limit), [7]) for row in plan.rows]
    rows += [RowAnswer(len(opening.tokens), [7]) for opening in plan.openings]
    return StepAnswer(plan.number, rows, [], pages // 2, 0)


def compare(shape: str) -> None:
    """Two cores, one without a log, must plan the same."""
    cases = [Case(*SHAPES[shape], log()) for log in (StepLog, NoLog)]
    for _ in range(60):
        plans = [case.step()[0] for case in cases]
        rows, others = ([(row.cache_id, row.kv_length) for row in plan.rows] for plan in plans)
        opened, others_opened = ([(one.cache_id, one.tokens) for one in plan.openings] for plan in plans)
        assert (rows, opened) == (others, others_opened), "other steps"


def measure(shape: str, rounds: int) -> tuple[list[float], list[float]]:
    """Of each round, by how many percent the turns with the log, and with a reader, take longer."""
    log, none = StepLog(), NoLog()
    case = Case(*SHAPES[shape], log)
    case.step()  # opens all sequences
    gc.collect()
    gc.freeze()
    orders = random.Random(3)
    alone: list[float] = []
    streamed: list[float] = []
    for _ in range(rounds):
        took: dict[str, list[float]] = {"none": [], "log": [], "streamed": []}
        first = log.end
        for _ in range(LOOK_STEPS):
            for kind in orders.sample(list(took), k=3):
                case.log(none if kind == "none" else log)
                took[kind].append(case.step()[1])
        without, logged, read = (statistics.median(seconds) for seconds in took.values())
        alone.append(100 * (logged / without - 1))
        streamed.append(100 * ((read + case.stream(first)) / without - 1))
    case.log(log)
    gc.unfreeze()
    return alone, streamed


def memory(requests: int) -> None:
    """Print what the core holds while requests come and go."""
    core = StepScheduler(CoreConfig(max_running=32))
    core.executor_ready(Capacity(4096, PAGE_SIZE, 1 << 20, 32, 32, 8192), 0.0)
    now, added, ended = 0.0, 0, 0
    while ended < requests:
        while added < min(requests, ended + 64):
            prompt, who = tuple(range(added % 1000, added % 1000 + 8)), f"account-{added % 50}"
            request = Request(f"{who} r{added}", prompt, SamplingSettings(), max_tokens=4, identity=who)
            core.add(request, now)
            added += 1
        plan = core.plan(now)
        assert plan is not None
        now, before = now + 0.5, ended
        ended += sum(isinstance(event, CompletionEnded) for event in core.apply(answer_to(plan, 4096), now))
        if 10 * before // requests != 10 * ended // requests:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            held = f"{pages / 256:.1f} MiB, of the log {core.log.size / 2**20:.1f} MiB"
            print(f"{ended:7} requests, {len(core.log):6} steps kept: {held}", flush=True)


def middle(percent: list[float]) -> float:
    """The mean without the tenth at either end, which other load has made."""
    cut = len(percent) // 10
    return statistics.fmean(sorted(percent)[cut : len(percent) - cut])


def line(kind: str, shape: str, percent: list[float], most: float) -> Line:
    """Print the mean and its 95 % interval; the line has the upper end."""
    rng, count = random.Random(1), len(percent)
    means = sorted(middle(rng.choices(percent, k=count)) for _ in range(2000))
    interval = f"{means[50]:+.1f} to {means[-51]:+.1f}"
    print(f"{shape}, {kind}: {middle(percent):+.1f} % ({interval})", flush=True)
    return Line(kind, shape, means[-51], most=most)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--requests", type=int, default=100_000)
    arguments = parser.parse_args()
    if arguments.memory:
        memory(arguments.requests)
        return 0
    lines = []
    for shape in SHAPES:
        compare(shape)
        log, streamed = measure(shape, arguments.rounds)
        lines.append(line("log", shape, log, MOST_LOG))
        lines.append(line("streamed", shape, streamed, MOST_STREAMED))
    return report(lines, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
