"""What the n-gram drafter costs a sequence per step, by context length and kind of text.

    python -m tests.bench.ngram_overhead [--context 8192] [--steps 2000] [--check-us 4.0]

Each step appends what a step emits (copying: the correct ones of 8 drafts and one token more; random and
prose: one token), then updates index and acceptance, and looks up 8 drafts. Prints the median and the 95th
percentile in microseconds, the cost of indexing a prompt, and the memory an index takes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import tracemalloc

from scheduler_service.core.speculation.drafters import NgramDrafter, ngram_populations

DRAFTS = 8


def texts(context: int, steps: int) -> dict[str, tuple[list[int], list[int], int]]:
    """By name: a prompt, what is generated after it, and the most tokens that a step emits."""
    rng = random.Random(7)
    source = [rng.randrange(49_152) for _ in range(context)]
    edited = [token if rng.random() > 0.02 else rng.randrange(49_152) for token in source]
    noise = [rng.randrange(49_152) for _ in range(steps)]
    # Zipf-like words, as in prose: short matches everywhere, chains of hundreds of common pairs
    prose = [int(1.0004 ** rng.randrange(27_000)) for _ in range(context + steps)]
    copies = (edited * (1 + 9 * steps // context))[: 9 * steps]
    return {
        "copying": (source, copies, 1 + DRAFTS),
        "random": (source, noise, 1),
        "prose": (prose[:context], prose[context:], 1),
        "repetition": ([5, 6, 7] * (context // 3), [5, 6, 7] * (3 * steps), 1 + DRAFTS),
    }


def measure(prompt: list[int], output: list[int], most: int, steps: int) -> tuple[list[float], float]:
    """Microseconds of each step, and the mean tokens emitted in one."""
    tokens = list(prompt)
    drafter = NgramDrafter(tokens, ngram_populations())
    while drafter.index.lag:
        drafter.update()
    took: list[float] = []
    at = 0
    drafts: tuple[int, ...] = ()
    for _ in range(steps):
        if at >= len(output):
            break
        emitted = 1
        while emitted < most and emitted <= len(drafts) and drafts[emitted - 1] == output[at + emitted - 1]:
            emitted += 1
        tokens += output[at : at + emitted]
        at += emitted
        began = time.perf_counter()
        drafter.update()
        candidate = drafter.candidate(DRAFTS)
        drafts = drafter.drafts(DRAFTS) if candidate else ()
        took.append((time.perf_counter() - began) * 1e6)
    return took, at / len(took)


def prompt_cost(prompt: list[int]) -> tuple[float, float]:
    """Microseconds and bytes per token of indexing a prompt."""
    drafter = NgramDrafter(list(prompt), ngram_populations())
    began = time.perf_counter()
    while drafter.index.lag:
        drafter.update()
    took = (time.perf_counter() - began) * 1e6
    tracemalloc.start()
    drafter = NgramDrafter(prompt, ngram_populations())
    while drafter.index.lag:
        drafter.update()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return took / len(prompt), held / len(prompt)


def main() -> int:
    """Measure and print; exit 1 when a median above --check-us comes out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--check-us", type=float, help="fail when a median is above this")
    arguments = parser.parse_args()
    worst = 0.0
    for name, (prompt, output, most) in texts(arguments.context, arguments.steps).items():
        took, emitted = measure(prompt, output, most, arguments.steps)
        median, p95 = statistics.median(took), statistics.quantiles(took, n=20)[18]
        us, held = prompt_cost(prompt)
        worst = max(worst, median)
        print(
            f"{name:10s} median {median:.2f} us  p95 {p95:.2f} us  {emitted:.2f} tokens a step"
            f"  (context {len(prompt)}; indexing: {us:.2f} us and {held:.0f} bytes a token)"
        )
    return 1 if arguments.check_us is not None and worst > arguments.check_us else 0


if __name__ == "__main__":
    sys.exit(main())
