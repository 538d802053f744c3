"""Automatic draft lengths against every fixed one, in a simulation with a virtual clock.

    python -m tests.bench.draft_lengths [--sequences 1,8,64] [--alpha 0.8] [--cycles 1500] [--check 0.95]

The real controller and its fits, in front of two executors that are formulas: the target takes 20 ms and
0.2 ms per token, the draft executor a tenth of that for each of its passes; a draft is right with probability
alpha, whatever came before. Prints tokens per second by fixed length, and the automatic one's share.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass, field

from scheduler_service.core.speculation.controller import Controller, DraftCandidate
from scheduler_service.core.speculation.drafters import ExecutorDrafter, executor_population
from scheduler_service.core.speculation.step_time import Work

MOST = 8  # drafts


def target_s(work: Work) -> float:
    """Seconds of a target step."""
    return 20e-3 + 0.2e-3 * work.tokens


def draft_s(work: Work) -> float:
    """Seconds of a draft step: a tenth of the target's for each pass."""
    return (target_s(work) + (work.steps - 1) * target_s(Work(work.rows, work.rows))) / 10


@dataclass
class Simulation:
    """So many sequences, all of them drafted for and verified in cycles."""

    sequences: int
    alpha: float
    fixed: int | None = None  # None: automatic
    cohorts: int = 1  # of a fixed length
    rng: random.Random = field(default_factory=lambda: random.Random(3))
    now: float = 0.0
    emitted: int = 0

    def __post_init__(self) -> None:
        self.controller = Controller(MOST)
        pool = executor_population()
        self.drafters = [ExecutorDrafter(pool) for _ in range(self.sequences)]
        self.pending = [1] * self.sequences
        self.chosen = [0] * (MOST + 1)
        self.in_cohorts = 0

    def choose(self) -> tuple[list[int], int]:
        """What this cycle drafts."""
        if self.fixed is not None:
            return [self.fixed] * self.sequences, self.cohorts
        candidates = []
        for drafter, pending in zip(self.drafters, self.pending, strict=True):
            candidate = drafter.candidate(MOST)
            assert candidate is not None
            candidates.append(DraftCandidate(candidate, None, pending))
        drafting = self.controller.drafting(Work(self.sequences, self.sequences), candidates)
        return drafting.lengths, drafting.cohorts

    def cycle(self) -> None:
        """Draft for all, verify all; in two cohorts one half beside the other."""
        lengths, cohorts = self.choose()
        self.in_cohorts += cohorts == 2
        middle = -(-self.sequences // cohorts)
        parts = [range(middle), range(middle, self.sequences)][:cohorts]
        took = []
        for part in parts:
            took.append((self.draft(part, lengths), self.verify(part, lengths)))
        if cohorts == 1:
            self.now += took[0][0] + took[0][1]
        else:
            self.now += max(took[0][0], took[1][1]) + max(took[1][0], took[0][1])

    def draft(self, part: range, lengths: list[int]) -> float:
        """Seconds of the draft step."""
        rows = [i for i in part if lengths[i]]
        if not rows:
            return 0.0
        work = Work(len(rows), sum(self.pending[i] for i in rows), 0, max(lengths[i] for i in rows))
        self.controller.draft.observe(work, draft_s(work))
        return draft_s(work)

    def verify(self, part: range, lengths: list[int]) -> float:
        """Seconds of the target step; what it accepted is learned."""
        work = Work(len(part), len(part) + sum(lengths[i] for i in part))
        self.controller.target.observe(work, target_s(work))
        for i in part:
            accepted = 0
            while accepted < lengths[i] and self.rng.random() < self.alpha:
                accepted += 1
            self.emitted += 1 + accepted
            self.chosen[lengths[i]] += 1
            if lengths[i]:
                self.drafters[i].verified(lengths[i], accepted)
                self.pending[i] = 2 if accepted == lengths[i] else 1
            else:
                self.pending[i] += 1
        return target_s(work)

    def rate(self, cycles: int) -> float:
        """Tokens per second over so many cycles, learning included."""
        for _ in range(cycles):
            self.cycle()
        return self.emitted / self.now


def main() -> int:
    """Sweep and print; exit 1 when automatic is below --check of the best fixed length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sequences", default="1,8,64")
    parser.add_argument("--alpha", type=float, default=0.8)
    parser.add_argument(
        "--cycles", type=int, default=1500, help="divided by the square root of the sequences"
    )
    parser.add_argument("--check", type=float, help="fail below this share of the best fixed length")
    arguments = parser.parse_args()
    worst = 1.0
    for sequences in (int(text) for text in arguments.sequences.split(",")):
        cycles = max(50, int(arguments.cycles / sequences**0.5))
        fixed = {}
        for length in range(MOST + 1):
            for cohorts in (1, 2) if sequences > 1 and length else (1,):
                fixed[length, cohorts] = Simulation(sequences, arguments.alpha, length, cohorts).rate(cycles)
        automatic = Simulation(sequences, arguments.alpha)
        rate = automatic.rate(cycles)
        best = max(fixed, key=lambda key: fixed[key])
        worst = min(worst, rate / fixed[best])
        sweep = "  ".join(f"{n}{'*' if c == 2 else ''}: {r:.0f}" for (n, c), r in fixed.items())
        print(f"{sequences} sequences, tokens/s by fixed length (*: two cohorts)  {sweep}")
        print(
            f"  automatic {rate:.0f} tokens/s = {rate / fixed[best]:.3f} of the best fixed"
            f" ({best[0]}, {best[1]} cohort); two cohorts in {automatic.in_cohorts / cycles:.0%} of cycles;"
            f" lengths {automatic.chosen}"
        )
    return 1 if arguments.check is not None and worst < arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
