"""What the scheduler's core costs per step: plan + apply with many running sequences.

    python -m tests.bench.core_overhead [--sequences 256] [--steps 400] [--check-ms 1.0]

Prints the median and the 95th percentile over all steps in which every sequence decodes, in
milliseconds, with plan and apply apart. Answers are made up outside of the measured time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.request import Request, Sampling
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.step import Capacity, Plan, Result, RowResult

PROMPT_TOKENS = 64
PAGE_SIZE = 16


def answer(plan: Plan, free_pages: int) -> Result:
    """Every row got what it asked for."""
    rows = [RowResult(row.kv_length + 1, [17]) for row in plan.rows]
    rows += [RowResult(len(opening.tokens), [17]) for opening in plan.openings]
    return Result(plan.number, rows, [], free_pages, 0)


def measure(sequences: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each plan and of each apply, while all sequences decode."""
    pages = sequences * (PROMPT_TOKENS + 2 * steps) // PAGE_SIZE
    capacity = Capacity(pages, PAGE_SIZE, 1 << 20, sequences, sequences, 1 << 16)
    core = Scheduler(CoreConfig(max_step_tokens=1 << 16, max_running=sequences))
    core.executor_ready(capacity, 0.0)
    for i in range(sequences):
        prompt = tuple(range(100, 100 + PROMPT_TOKENS))
        core.add(Request(f"request-{i}", prompt, Sampling(), eos_token_ids=frozenset({2})), 0.0)
    plans, applies = [], []
    for number in range(steps):
        began = time.perf_counter()
        plan = core.plan(float(number))
        planned = time.perf_counter()
        assert plan is not None
        result = answer(plan, pages - number * sequences // PAGE_SIZE)
        answered = time.perf_counter()
        core.apply(result, float(number))
        applied = time.perf_counter()
        if len(plan.rows) == sequences:
            plans.append(planned - began)
            applies.append(applied - answered)
    return plans, applies


def main() -> int:
    """Measure and print; exit 1 when a median above --check-ms comes out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--check-ms", type=float, help="fail when the median of plan + apply is above this")
    arguments = parser.parse_args()
    plans, applies = measure(arguments.sequences, arguments.steps)
    total = [p + a for p, a in zip(plans, applies, strict=True)]
    for name, seconds in (("plan", plans), ("apply", applies), ("plan + apply", total)):
        median, p95 = statistics.median(seconds) * 1e3, statistics.quantiles(seconds, n=20)[18] * 1e3
        print(f"{name:13s} median {median:.3f} ms   p95 {p95:.3f} ms   ({arguments.sequences} sequences)")
    too_slow = arguments.check_ms is not None and statistics.median(total) * 1e3 > arguments.check_ms
    return 1 if too_slow else 0


if __name__ == "__main__":
    sys.exit(main())
