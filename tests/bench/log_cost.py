"""What the step log costs the scheduler's core: its share of plan + apply.

    python -m tests.bench.log_cost [--steps 400] [--json FILE]
    python -m tests.bench.log_cost --memory [--requests 100000]

The log's calls are timed within the steps of one core, so that other load weighs on both alike: two cores,
with and without a log, differ by more than the log takes. The median over 40 steps of what its calls took,
less what the clock itself takes, is divided by the median of the rest of plan + apply. `streamed`: beside
that, the log is read and encoded for one caller every quarter of a second, at 50 steps a second, as by
`paceline steps`; the median of all such readings is shared among the steps. Printed is the mean over all
blocks of 40 steps, and its 95 % confidence interval by resampling them. Sequences end after 50 to 150 tokens
where others wait, so that 1 in 100 is replaced in each step; else they go on. Before, two cores, one of them
without a log, must plan the same 60 steps. Exit status 1 if an interval ends above 3 % (`log`) or 8 %
(`streamed`).

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
from typing import Any

from service_kit.identity import Identity

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.events import CompletionEnded
from scheduler_service.core.request import Request, SamplingSettings
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.step import Capacity, PlannedStep, RowAnswer, StepAnswer
from scheduler_service.core.step_log import StepLog
from scheduler_service.rpc.codec.steps import step_log
from tests.bench.figures import Line, report

PAGE_SIZE, PROMPT, STEP_S, BLOCK, LOOK_STEPS = 16, 64, 0.02, 40, 12
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


class TimedLog(StepLog):
    """Adds up what its calls take."""

    def __init__(self) -> None:
        super().__init__()
        self.took, self.calls = 0.0, 0

    def note(self, *given: Any) -> None:
        began = time.perf_counter()
        super().note(*given)
        self.took += time.perf_counter() - began
        self.calls += 1

    def answered(self, *given: Any) -> None:
        began = time.perf_counter()
        super().answered(*given)
        self.took += time.perf_counter() - began
        self.calls += 1


class Case:
    """A core with its requests."""

    def __init__(self, rows: int, waiting: int, accounts: int, log: StepLog) -> None:
        most = (rows + waiting) * PROMPT + (1 << 16)
        config = CoreConfig(
            max_step_tokens=most,
            prefill_chunk_tokens=most,
            max_running=rows,
            max_queued_tokens=most,
            max_queued_requests=4 * (rows + waiting),  # an account has its share of them
        )
        self.core = core = StepScheduler(config)
        core._pool.log = log
        self._pages, self._now, self._read = rows * 400, 0.0, 1
        core.executor_ready(Capacity(self._pages, PAGE_SIZE, 1 << 20, rows, rows, most), 0.0)
        lengths = random.Random(7)
        for number in range(rows + waiting):
            request = Request(
                f"request-{number}",
                tuple(range(number, number + PROMPT)),
                SamplingSettings(),
                max_tokens=lengths.randrange(50, 150) if waiting else 5000,
                identity=f"account-{number % accounts}",
            )
            core.add(request, 0.0)

    def step(self) -> tuple[PlannedStep, float]:
        """One step, and the seconds of plan + apply."""
        began = time.perf_counter()
        plan = self.core.plan(self._now)
        planned = time.perf_counter()
        assert plan is not None
        answer = answer_to(plan, self._pages)
        self._now += STEP_S
        resumed = time.perf_counter()
        self.core.apply(answer, self._now)
        return plan, planned - began + time.perf_counter() - resumed

    def stream(self) -> float:
        """Read and encode the new steps; seconds for each."""
        began, read = time.perf_counter(), self._read
        while (part := self.core.log.read(self._read, len(self.core.log))) is not None:
            step_log(part, 0, READER, 0.0).SerializeToString()
            self._read = part.first_step + len(part)
        return (time.perf_counter() - began) / max(1, self._read - read)


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


def tick_s() -> float:
    """Seconds that asking the clock takes."""
    begin = time.perf_counter()
    for _ in range(10_000):
        time.perf_counter()
    return (time.perf_counter() - begin) / 10_000


def measure(shape: str, steps: int) -> tuple[list[float], list[float]]:
    """Of each block, the percentage of the rest of plan + apply that the log takes; and with a reader."""
    log, tick = TimedLog(), min(tick_s() for _ in range(5))
    case = Case(*SHAPES[shape], log)
    case.step()  # opens all sequences
    gc.collect()
    gc.freeze()
    alone: list[float] = []
    rests: list[float] = []
    reading: list[float] = []
    for _ in range(steps // BLOCK):
        logging: list[float] = []
        rest: list[float] = []
        for at in range(BLOCK):
            log.took, log.calls = 0.0, 0
            took = case.step()[1]
            rest.append(took - log.took)
            logging.append(log.took - log.calls * tick)
            if at % LOOK_STEPS == LOOK_STEPS - 1:
                reading.append(case.stream())
        rests.append(statistics.median(rest))
        alone.append(100 * statistics.median(logging) / rests[-1])
    gc.unfreeze()
    read_s = statistics.median(reading)
    return alone, [one + 100 * read_s / rest_s for one, rest_s in zip(alone, rests, strict=True)]


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


def line(kind: str, shape: str, percent: list[float], most: float) -> Line:
    """Print the mean and its 95 % interval; the line has the upper end."""
    rng, count = random.Random(1), len(percent)
    means = sorted(statistics.fmean(rng.choices(percent, k=count)) for _ in range(2000))
    interval = f"{means[50]:+.1f} to {means[-51]:+.1f}"
    print(f"{shape}, {kind}: {statistics.fmean(percent):+.1f} % ({interval})", flush=True)
    return Line(kind, shape, means[-51], most=most)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=400)
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
        log, streamed = measure(shape, arguments.steps)
        lines.append(line("log", shape, log, MOST_LOG))
        lines.append(line("streamed", shape, streamed, MOST_STREAMED))
    return report(lines, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
