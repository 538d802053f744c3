"""What the scheduler's core costs per step: plan + apply with many running sequences.

    python -m tests.bench.core_overhead [--sequences 256] [--steps 400] [--check-ms 1.0]
                                        [--prompt-tokens 64] [--speculation [--edits 8 | --chance 64]]

Prints mean, median and the 95th percentile over all steps in which every sequence decodes, in
milliseconds, with plan and apply apart. Answers are made up outside of the measured time. With
--speculation every sequence drafts by n-grams, with automatic lengths, and the step time that the
controller sees is modelled. What each sequence writes:

    --edits N    a text that repeats itself with one token of N changed; 1: nothing ever recurs
    --chance N   tokens drawn from N: pairs recur, and what followed them says nothing
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from hashlib import blake2b

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.request import DraftingWish, DraftSource, Request, SamplingSettings
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.snapshot import Totals
from scheduler_service.core.step import Capacity, PlannedStep, RowAnswer, StepAnswer

PAGE_SIZE = 16
END = frozenset({2})


Text = Callable[[int, int], int]
"""Token by sequence and position."""


def chance(sequence: int, position: int, tokens: int) -> int:
    """One of `tokens` tokens, by a hash."""
    digest = blake2b(b"%d %d" % (sequence, position), digest_size=8).digest()
    return 100 + int.from_bytes(digest, "little") % tokens


def edited(sequence: int, position: int, edits: int) -> int:
    """Of a passage that comes again and again, with one token of `edits` changed."""
    changed = (sequence * 7919 + position * 104729) >> 3
    return 1000 + changed % 5000 if changed % edits == 0 else 100 + position % 61


def answer(plan: PlannedStep, free_pages: int, text: Text) -> StepAnswer:
    """Every row gets what its sequence writes: one token, and those drafts that foresaw it."""
    rows = []
    for row in plan.rows:
        tokens = [text(row.cache_id, row.kv_length + 1)]
        for draft in row.drafts:
            if draft != tokens[-1]:
                break
            tokens.append(text(row.cache_id, row.kv_length + 1 + len(tokens)))
        rows.append(RowAnswer(row.kv_length + len(tokens), tokens))
    for opening in plan.openings:
        known = len(opening.tokens)
        rows.append(RowAnswer(known, [text(opening.cache_id, known)]))
    return StepAnswer(plan.number, rows, [], free_pages, 0)


def measure(
    sequences: int, steps: int, prompt_tokens: int, text: Text, *, speculate: bool
) -> tuple[list[float], list[float], Totals]:
    """Seconds of each plan and of each apply, while all sequences decode; and what was counted."""
    pages = sequences * (prompt_tokens + 10 * steps) // PAGE_SIZE
    most = sequences * prompt_tokens + (1 << 16)
    capacity = Capacity(pages, PAGE_SIZE, 1 << 20, sequences, sequences, most)
    config = CoreConfig(
        max_step_tokens=most,
        prefill_chunk_tokens=most,
        max_running=sequences,
        max_queued_tokens=most,
    )
    core = StepScheduler(config)
    core.executor_ready(capacity, 0.0)
    speculation = DraftingWish(frozenset({DraftSource.NGRAM} if speculate else ()))
    for i in range(sequences):
        prompt = tuple(text(i + 1, position) for position in range(prompt_tokens))
        core.add(
            Request(
                f"request-{i}",
                prompt,
                SamplingSettings(),
                eos_token_ids=frozenset({2}),
                speculation=speculation,
            ),
            0.0,
        )
    plans: list[float] = []
    applies: list[float] = []
    now = 0.0
    while len(plans) < steps:
        began = time.perf_counter()
        plan = core.plan(now)
        planned = time.perf_counter()
        assert plan is not None
        result = answer(plan, pages // 2, text)
        now += 0.02 + 1e-4 * sum(1 + len(row.drafts) for row in plan.rows)
        answered = time.perf_counter()
        core.apply(result, now)
        applied = time.perf_counter()
        if len(plan.rows) == sequences:
            plans.append(planned - began)
            applies.append(applied - answered)
    return plans, applies, core.snapshot().counters


def main() -> int:
    """Measure and print; exit 1 when a median above --check-ms comes out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--speculation", action="store_true", help="every sequence drafts by n-grams")
    parser.add_argument("--edits", type=int, default=8, help="one token of so many is not foreseen")
    parser.add_argument("--chance", type=int, help="tokens are drawn from so many instead")
    parser.add_argument("--check-ms", type=float, help="fail when the median of plan + apply is above this")
    arguments = parser.parse_args()
    text = (
        partial(chance, tokens=arguments.chance)
        if arguments.chance
        else partial(edited, edits=arguments.edits)
    )
    plans, applies, counters = measure(
        arguments.sequences, arguments.steps, arguments.prompt_tokens, text, speculate=arguments.speculation
    )
    total = [p + a for p, a in zip(plans, applies, strict=True)]
    for name, seconds in (("plan", plans), ("apply", applies), ("plan + apply", total)):
        median, p95 = statistics.median(seconds) * 1e3, statistics.quantiles(seconds, n=20)[18] * 1e3
        mean = statistics.fmean(seconds) * 1e3
        print(
            f"{name:13s} mean {mean:.3f} ms   median {median:.3f} ms   p95 {p95:.3f} ms"
            f"   ({arguments.sequences} sequences)"
        )
    if counters.verifications:
        tokens_a_row = counters.completion_tokens / counters.rows
        print(
            f"{counters.verifications} verifications, {counters.drafted_tokens} drafts, "
            f"{counters.accepted_tokens} accepted, {tokens_a_row:.2f} tokens a row"
        )
    too_slow = arguments.check_ms is not None and statistics.median(total) * 1e3 > arguments.check_ms
    return 1 if too_slow else 0


if __name__ == "__main__":
    sys.exit(main())
