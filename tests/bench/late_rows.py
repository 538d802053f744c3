"""What rows with penalties, logprobs or masks of stop ids cost the others of a step on CUDA.

Needs the triton extra, and no GPU.

    python -m tests.bench.late_rows [--rows 256] [--step-ms 13.5] [--steps 60] [--rounds 5] [--check]

The device is a clock: a step takes `--step-ms`, and reading its results waits for that. The clock runs by
the CPU time of this thread, and waiting sets it forward, so that other load does not matter. The engine, its
pipeline of two steps and the host's part of `DeviceRunner` are real; kernels are not launched, and torch's
operations work on a small vocabulary. All cases run in each round, in turn. Printed are the medians of the
step time and of the CPU time that the host took for a step, by the number of rows that want something. What
the device itself does for these rows is not in it.
--check fails where one such row makes the step more than 2 % longer.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from executor_service.contract.limits import Limits
from executor_service.contract.plan import NO_TOKENS, Opening, Row, Sampling, StepPlan
from executor_service.steps.engine import Engine
from tests.support.clocked_runner import VOCABULARY, ClockedRunner, CpuClock, no_kernels
from tests.support.engine_steps import begin, planned

PAGE, PAGES, CONTEXT, PROMPT = 16, 40_000, 2048, 500
GOAL = 0.02
WARM_UP = 10  # steps
KINDS: Mapping[str, Sampling] = {
    "penalties": Sampling(temperature=0.7, repetition_penalty=1.1, frequency_penalty=0.2),
    "5 logprobs": Sampling(temperature=0.7, logprobs=5),
    "everything": Sampling(
        temperature=0.7, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.2, logit_bias=((5, 1.0),),
        logprobs=5, stop_token_ids=(2,), min_tokens=2000,
    ),
}  # fmt: skip


class Case:
    """An engine with its sequences, all decoding, some of which want something."""

    def __init__(self, rows: int, special: int, sampling: Sampling) -> None:
        self._clock = CpuClock()
        self._runner = backend = ClockedRunner(self._clock, PAGES, PAGE, CONTEXT)
        backend.max_piece_tokens = 1 << 20  # type: ignore[attr-defined]
        limits = Limits(
            VOCABULARY, CONTEXT, PAGE, PAGES - 1, max_sequences=rows, max_rows=rows,
            max_step_tokens=rows * CONTEXT, max_piece_tokens=1 << 20,
        )  # fmt: skip
        self._engine = Engine(backend, limits, 1)  # type: ignore[arg-type]
        self._rows, self._length = rows, PROMPT
        tokens = np.ones(PROMPT, np.int32)
        openings = tuple(
            Opening(
                i + 1, tokens, PROMPT, 0,
                replace(sampling if i < special else Sampling(temperature=0.7), seed=i),
                salt=i.to_bytes(4),
            )
            for i in range(rows)
        )  # fmt: skip
        begin(self._engine, StepPlan(openings=openings)).finish()

    def run(self, steps: int, step_s: float) -> tuple[float, float]:
        """Seconds and CPU seconds of a step, two being in flight."""
        self._runner.step_s = step_s
        ahead = self._begin()
        for n in range(WARM_UP + steps):
            if n == WARM_UP:
                start_s, start_cpu_s = self._clock.now(), time.thread_time()
            behind = self._begin()
            assert len(self._engine.pipeline) == 2, "a step waits for the one before it"
            ahead.finish()
            ahead = behind
        elapsed = self._clock.now() - start_s, time.thread_time() - start_cpu_s
        ahead.finish()
        return elapsed[0] / steps, elapsed[1] / steps

    def _begin(self) -> Any:
        rows = tuple(Row(i + 1, self._length, NO_TOKENS, NO_TOKENS) for i in range(self._rows))
        self._length += 1
        return begin(self._engine, StepPlan(rows=planned(rows)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=13.5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = {"nothing": (0, Sampling())} | {
        f"{name}, {n} rows": (n, sampling)
        for name, sampling in KINDS.items()
        for n in sorted({1, min(16, options.rows), options.rows})
    }
    with no_kernels():
        cases = {name: Case(options.rows, n, sampling) for name, (n, sampling) in wanted.items()}
        gc.collect()
        gc.freeze()  # as services do
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
        for _ in range(options.rounds):
            for name, case in cases.items():
                found[name].append(case.run(options.steps, options.step_ms / 1000))
    print(f"{options.rows} rows, a step of {options.step_ms} ms, two in flight")
    print(f"{'':24}{'ms a step':>10}{'longer':>9}{'host CPU ms':>13}")
    medians = {name: tuple(map(statistics.median, zip(*runs, strict=True))) for name, runs in found.items()}
    base = medians["nothing"][0]
    bad = 0
    for name, (step_s, cpu_s) in medians.items():
        longer = step_s / base - 1
        bad += wanted[name][0] == 1 and longer > GOAL
        print(f"{name:24}{step_s * 1e3:10.2f}{longer:9.1%}{cpu_s * 1e3:13.2f}")
    return int(options.check and bad > 0)


if __name__ == "__main__":
    sys.exit(main())
