"""The choice of draft lengths: right for known costs, and never a loss where drafts are mostly wrong."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.core.speculation.controller import (
    CAUTION,
    PROBE_EVERY,
    Candidate,
    Controller,
    DraftCandidate,
)
from scheduler_service.core.speculation.step_time import StepTime, Work
from tests.bench.draft_lengths import Simulation
from tests.unit.scheduler.speculation.ngram_simulation import (
    Text,
    chat,
    copying,
    cpu_step_s,
    gpu_step_s,
    tokens_per_second,
)


def controller(most: int = 8) -> Controller:
    """One that knows the CPU's step times."""
    made = Controller(most)
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for _ in range(4):
            made.target.observe(Work(rows, rows), cpu_step_s(Work(rows, rows)))
            made.draft.observe(Work(rows, rows), cpu_step_s(Work(rows, rows)) / 10)
    return made


def promised(candidates: list[Candidate], lengths: tuple[int, ...], fit: StepTime, base: Work) -> float:
    """Tokens per second by the formula."""
    emitted = float(base.rows)
    for candidate, length in zip(candidates, lengths, strict=True):
        emitted += sum(candidate.first * candidate.later**j for j in range(length))
    return emitted / (fit.seconds(base) + CAUTION * float(fit.added(base, sum(lengths))[-1]))


probability = st.floats(0.0, 0.999)
candidate_lists = st.lists(
    st.builds(Candidate, probability, probability, st.integers(1, 5)), min_size=1, max_size=4
)


@settings(max_examples=40)
@given(candidate_lists, st.integers(0, 20))
def test_no_other_lengths_promise_more(candidates: list[Candidate], others: int) -> None:
    made = controller(4)
    base = Work(len(candidates) + others, len(candidates) + others)
    chosen = tuple(made.lengths(base, candidates))
    ranges = [range(min(4, candidate.most) + 1) for candidate in candidates]
    best = max(promised(candidates, lengths, made.target, base) for lengths in itertools.product(*ranges))
    assert promised(candidates, chosen, made.target, base) == pytest.approx(best)


def test_better_drafts_come_first_and_bounds_hold() -> None:
    candidates = [
        Candidate(0.95, 0.95, 8),
        Candidate(0.95, 0.95, 2),
        Candidate(0.75, 0.5, 8),
        Candidate(0.01, 0.9, 8),
    ]
    lengths = controller().lengths(Work(4, 4), candidates)
    assert lengths[0] > lengths[2] >= 1
    assert lengths[1] == 2
    assert lengths[3] == 0
    assert controller().lengths(Work(4, 4), []) == []


def test_fewer_drafts_the_fuller_the_step() -> None:
    totals = []
    for others in (0, 7, 31, 255):
        totals += controller().lengths(Work(1 + others, 1 + others), [Candidate(0.6, 0.6, 8)])
    assert totals == sorted(totals, reverse=True)
    assert totals[0] >= 3
    assert totals[-1] <= 1


def test_prompt_chunks_do_not_make_drafts_look_cheap() -> None:
    candidates = [Candidate(0.3, 0.3, 8)]
    alone = controller().lengths(Work(32, 32), candidates)
    beside = controller().lengths(Work(32, 32, prompt=256), candidates)
    assert sum(beside) <= sum(alone)


@pytest.mark.parametrize("streams", [1, 4, 8, 16, 32])
def test_free_chat_is_as_fast_as_plain(streams: int) -> None:
    rng = random.Random(streams)
    texts = [chat(rng, 120) for _ in range(streams)]
    assert tokens_per_second(texts, cpu_step_s, None) >= 0.97 * tokens_per_second(texts, cpu_step_s, 0)


@pytest.mark.parametrize("streams", [1, 8, 32])
@pytest.mark.parametrize("step_s", [cpu_step_s, gpu_step_s])
def test_copying_is_nearly_as_fast_as_with_the_best_length(streams: int, step_s: object) -> None:
    rng = random.Random(streams)
    texts = [copying(rng, 200) for _ in range(streams)]
    step = cpu_step_s if step_s is cpu_step_s else gpu_step_s
    best = max(tokens_per_second(texts, step, length) for length in (0, 2, 4, 8))
    assert tokens_per_second(texts, step, None) >= 0.88 * best


def test_both_kinds_at_once_are_faster_than_plain() -> None:
    rng = random.Random(4)
    texts: list[Text] = [copying(rng, 200) for _ in range(4)] + [chat(rng, 200) for _ in range(4)]
    assert tokens_per_second(texts, cpu_step_s, None) >= 1.1 * tokens_per_second(texts, cpu_step_s, 0)


@pytest.mark.parametrize(("sequences", "cycles"), [(1, 600), (8, 200), (64, 150)])
def test_the_draft_executor_is_used_nearly_as_well_as_by_the_best_length(sequences: int, cycles: int) -> None:
    best = max(Simulation(sequences, 0.8, length).rate(cycles) for length in range(9))
    assert Simulation(sequences, 0.8).rate(cycles) >= 0.95 * best


@pytest.mark.parametrize("sequences", [1, 16])
def test_a_useless_draft_executor_costs_next_to_nothing(sequences: int) -> None:
    plain = Simulation(sequences, 0.05, 0).rate(300)
    assert Simulation(sequences, 0.05).rate(300) >= 0.97 * plain


def draft_candidate(alpha: float, ngram: float | None = None) -> DraftCandidate:
    proposal = None if ngram is None else Candidate(ngram, ngram, 8)
    return DraftCandidate(Candidate(alpha, alpha, 8), proposal, 1)


def test_a_sequence_takes_the_drafter_that_promises_more() -> None:
    candidates = [
        draft_candidate(0.8),
        draft_candidate(0.8, 0.97),
        draft_candidate(0.8, 0.1),
        draft_candidate(0.05),
    ]
    lengths = controller().drafting(Work(4, 4), candidates).lengths
    assert lengths[0] > 0
    assert lengths[1] == 0
    assert lengths[2] > 0
    assert lengths[3] == 0


def test_two_cohorts_where_drafting_hides_behind_verifying() -> None:
    """Drafting takes more than what a second target step costs anew: 4 x 4 ms against 10 ms."""
    made = Controller(4)
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for _ in range(8):
            made.target.observe(Work(rows, rows), 10e-3 + 0.05e-3 * rows)
            made.draft.observe(Work(rows, rows), 4e-3 + 1e-6 * rows)
    candidates = [draft_candidate(0.9) for _ in range(64)]
    assert made.drafting(Work(64, 64), candidates).cohorts == 2
    assert controller().drafting(Work(8, 8), [draft_candidate(0.9)] * 8).cohorts == 1


def test_a_draft_executor_that_seems_useless_is_tried_again_and_again_but_rarely() -> None:
    made = controller()
    asked = [sum(made.drafting(Work(8, 8), [draft_candidate(0.01)] * 8).lengths) for _ in range(2000)]
    tries = [i for i, drafts in enumerate(asked) if drafts]
    assert tries[0] == PROBE_EVERY - 1
    assert 4 <= len(tries) <= 8
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps == sorted(gaps)


def test_a_size_that_was_never_seen_is_tried_until_it_is_known() -> None:
    made = Controller(8)
    tries = 0
    for _ in range(1000):
        base = Work(32, 32)
        lengths = made.lengths(base, [Candidate(0.2, 0.2, 8)] * 32)
        tries += any(lengths)
        work = Work(32, 32 + sum(lengths))
        made.target.observe(work, cpu_step_s(work))
    assert 1 <= tries <= 4
