"""The fit of step times: it finds the truth where it was measured, and stays sane elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_service.core.speculation import step_time
from scheduler_service.core.speculation.step_time import StepTime, Work

Formula = Callable[[Work], float]


def cpu(work: Work) -> float:
    """Flat to two tokens, then linear."""
    return 20e-3 + 2.5e-3 * max(work.tokens, 2) + 0.2e-6 * work.context


def gpu(work: Work) -> float:
    """Flat to 64 tokens, then linear."""
    return 8e-3 + 0.03e-3 * max(work.tokens, 64) + 10e-9 * work.context


def decode(rows: int) -> Work:
    """A plain step with 200 tokens of context a row."""
    return Work(rows, rows, 200 * rows)


def fitted(formula: Formula, works: Iterable[Work], noise: float = 0.08, outliers: float = 0.0) -> StepTime:
    rng = random.Random(2)
    fit = StepTime()
    for work in works:
        slow = 20.0 if rng.random() < outliers else 1.0
        fit.observe(work, formula(work) * rng.lognormvariate(0.0, noise) * slow)
    return fit


def ramp(*rows: int) -> list[Work]:
    return [decode(n) for n in rows for _ in range(10)]


def marginal(formula: Formula, tokens: int, more: int) -> float:
    """Seconds that so many more tokens cost."""
    base = decode(tokens)
    return formula(Work(tokens, tokens + more, base.context)) - formula(base)


@pytest.mark.parametrize("formula", [cpu, gpu])
def test_steps_of_all_sizes_are_learned(formula: Formula) -> None:
    fit = fitted(formula, ramp(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256), noise=0.03)
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        assert fit.seconds(decode(rows)) == pytest.approx(formula(decode(rows)), rel=0.1)


@pytest.mark.parametrize("formula", [cpu, gpu])
def test_hours_of_the_same_step_leave_the_marginal_cost_as_it_was(formula: Formula) -> None:
    """rows = tokens = 32 says nothing about what a token costs: what was known before must stay."""
    early = ramp(1, 2, 4, 8, 16, 32, 64)
    before = fitted(formula, early)
    after = fitted(formula, early + [decode(32)] * 10_000)
    for more in (8, 32):
        found = marginal(after.seconds, 32, more)
        assert found == pytest.approx(marginal(before.seconds, 32, more), rel=0.3, abs=0.5e-3)
        assert found == pytest.approx(marginal(formula, 32, more), rel=0.3, abs=0.5e-3)


def test_a_single_size_gives_a_plausible_curve() -> None:
    fit = fitted(cpu, [decode(32)] * 500)
    assert fit.seconds(decode(32)) == pytest.approx(cpu(decode(32)), rel=0.1)
    assert (
        0 < fit.seconds(decode(1)) < fit.seconds(decode(32)) < fit.seconds(decode(64)) < 3 * cpu(decode(32))
    )


def test_outliers_change_little() -> None:
    works = ramp(1, 2, 4, 8, 16, 32) * 5
    fit = fitted(cpu, works, outliers=0.03)
    for rows in (1, 8, 32):
        assert fit.seconds(decode(rows)) == pytest.approx(cpu(decode(rows)), rel=0.2)


def test_the_first_steps_may_compile() -> None:
    fit = StepTime()
    for seconds in (30.0, 5.0, 0.03, 0.03, 0.03):
        fit.observe(decode(1), seconds)
    assert fit.seconds(decode(1)) == pytest.approx(0.03, rel=0.05)


def test_a_machine_that_became_slower_is_followed() -> None:
    fit = fitted(cpu, [decode(8)] * 200)
    for _ in range(150):
        fit.observe(decode(8), 3 * cpu(decode(8)))
    assert fit.seconds(decode(8)) == pytest.approx(3 * cpu(decode(8)), rel=0.1)


def test_the_passes_of_a_draft_step_are_told_apart() -> None:
    def draft(work: Work) -> float:
        return (2 + 0.02 * work.tokens + (work.steps - 1) * (2 + 0.02 * work.rows)) * 1e-3

    works = [Work(n, 2 * n, 0, k) for n in (1, 8, 64) for k in (1, 4, 6) for _ in range(5)]
    fit = fitted(draft, works, noise=0.03)
    for work in (Work(8, 8, 0, 2), Work(8, 16, 0, 8), Work(64, 64, 0, 5), Work(32, 40, 0, 3)):
        assert fit.seconds(work) == pytest.approx(draft(work), rel=0.15)


def test_a_slower_path_for_ragged_steps_is_told_from_the_cost_of_a_token() -> None:
    """As where plain decoding replays a graph and anything else does not."""

    def graphs(work: Work) -> float:
        return gpu(work) + (6e-3 if work.tokens > work.rows else 0.0)

    verifications = [Work(32, 32 + drafts, 6400) for drafts in (2, 8, 20, 32) for _ in range(10)]
    fit = fitted(graphs, ramp(1, 2, 4, 8, 16, 32) + verifications, noise=0.03)
    assert fit.seconds(decode(32)) == pytest.approx(graphs(decode(32)), rel=0.1)
    added = fit.added(decode(32), 32)
    assert added[0] == 0
    assert added[2] == pytest.approx(6e-3, rel=0.25)
    assert added[32] == pytest.approx(6e-3, rel=0.25)


def test_prompts_that_cost_less_a_token_do_not_make_drafts_look_cheap() -> None:
    """A chunk needs no logits, and many tokens of one sequence are cheaper than as many rows."""

    def with_prompts(work: Work) -> float:
        return cpu(work) + 1e-3 * work.prompt

    chunks = [
        Work(n, n, 200 * n, prompt=size) for n in (0, 4, 15) for size in (40, 100, 256) for _ in range(10)
    ]
    verifications = [Work(16, 16 + drafts, 3200) for drafts in (4, 16, 30) for _ in range(10)]
    fit = fitted(with_prompts, ramp(1, 4, 8, 16) + chunks + verifications, noise=0.03)
    assert fit.seconds(Work(8, 8, 1600, prompt=128)) == pytest.approx(
        with_prompts(Work(8, 8, 1600, prompt=128)), rel=0.1
    )
    assert marginal(fit.seconds, 16, 24) == pytest.approx(marginal(cpu, 16, 24), rel=0.2)


def test_sizes_that_were_seen_are_known() -> None:
    fit = fitted(cpu, ramp(32))
    assert fit.has_seen(decode(32))
    assert fit.has_seen(Work(33, 33))
    assert not fit.has_seen(Work(32, 33))
    assert not fit.has_seen(Work(64, 64))
    assert not StepTime().has_seen(decode(1))


works = st.builds(
    Work,
    st.integers(1, 64),
    st.integers(1, 6000),
    st.integers(0, 10**6),
    st.integers(1, 8),
    st.integers(0, 1) | st.integers(0, 6000),
)


@settings(max_examples=40)
@given(st.lists(st.tuples(works, st.floats(1e-6, 100.0)), max_size=30), works)
@example([(Work(1, 1), 1.0)] * 4 + [(Work(1, 1, prompt=1), 2.0)], Work(41, 1))  # ragged from 42 tokens on
def test_whatever_was_measured_more_work_is_never_cheaper(seen: list[tuple[Work, float]], work: Work) -> None:
    fit = StepTime()
    for observed, seconds in seen:
        fit.observe(observed, seconds)
    seconds = fit.seconds(work)
    assert seconds > 0
    for more in (
        replace(work, tokens=work.tokens + 1),
        replace(work, prompt=work.prompt + 1),
        replace(work, context=work.context + 1000),
        replace(work, steps=work.steps + 1),
    ):
        assert fit.seconds(more) >= seconds * (1 - 1e-9)
    added = fit.added(Work(work.rows, work.tokens), 40)
    assert added[0] == 0
    one = Work(work.rows, work.tokens)
    further = Work(work.rows, work.tokens + 40)
    rounding = 1e-9 * fit.seconds(further)
    assert added[40] == pytest.approx(fit.seconds(further) - fit.seconds(one), rel=1e-6, abs=rounding)
    assert (added[1:] >= added[:-1] - rounding).all()


def test_it_is_fitted_when_a_duration_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[Any] = []

    def counted(*arguments: Any) -> Any:
        fits.append(arguments)
        return solve(*arguments)

    solve = step_time._non_negative
    monkeypatch.setattr(step_time, "_non_negative", counted)
    fit = fitted(cpu, [decode(rows) for rows in (1, 2, 4, 8) * 50])
    assert not fits
    assert fit.seconds(decode(8)) == pytest.approx(cpu(decode(8)), rel=0.1)
    fit.least_slope(8, 4)
    fit.added(decode(8), 4)
    assert len(fits) == 1


def test_what_can_not_be_is_ignored() -> None:
    fit = StepTime()
    before = fit.seconds(decode(1))
    fit.observe(decode(1), 0.0)
    fit.observe(decode(1), -1.0)
    fit.observe(decode(1), float("nan"))
    fit.observe(Work(0, 0), 1.0)
    assert fit.seconds(decode(1)) == before
