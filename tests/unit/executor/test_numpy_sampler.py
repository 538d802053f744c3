"""The sampler does what `plan.Sampling` says, in that order, without state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.backends.numpy_sampler import adjust, choose, keep, log_softmax, sample, sample_rows
from executor_service.contract import noise
from executor_service.contract.plan import OutputMode, Sampling
from tests.support.untyped import present
from tests.unit.executor.rows import make_row

NONE = np.zeros(0, dtype=np.int32)


def fp32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def draws(logits: np.ndarray, count: int, **settings: object) -> list[int]:
    """One draw per seed."""
    return [choose(logits, NONE, 0, Sampling(seed=seed, **settings)) for seed in range(count)]  # type: ignore[arg-type]


def chi_square(observed: Sequence[int], probabilities: np.ndarray) -> float:
    expected = probabilities * len(observed)
    counts = np.bincount(observed, minlength=len(probabilities))
    assert not counts[probabilities == 0].any(), "drew what was filtered out"
    live = probabilities > 0
    return float(((counts - expected)[live] ** 2 / expected[live]).sum())


LOGITS = fp32(2.0, 1.0, 0.5, 0.0, -1.0, 1.5, -2.0, 0.7)
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 7: 24.32}  # chi-square, 0.1 %


@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        ({"temperature": 1.0}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"temperature": 2.0, "top_k": 3}, [0, 1, 5]),
        ({"temperature": 1.0, "top_p": 0.6}, [0, 1, 5]),  # masses .384, .617
        ({"temperature": 1.0, "min_p": 0.3}, [0, 1, 5]),
    ],
)
def test_draws_follow_the_filtered_softmax(sampling: dict[str, float], left: list[int]) -> None:
    probabilities = np.zeros(8)
    probabilities[left] = np.exp(LOGITS[left].astype(np.float64) / sampling["temperature"])
    probabilities /= probabilities.sum()
    if "top_p" in sampling:  # the cut is decided by the test's own arithmetic, not by a list alone
        whole = np.exp(LOGITS.astype(np.float64))
        whole = np.sort(whole / whole.sum())[::-1]
        probabilities = np.zeros(8)
        count = int((np.cumsum(whole) < sampling["top_p"]).sum()) + 1
        best = np.argsort(-LOGITS)[:count]
        probabilities[best] = whole[:count] / whole[:count].sum()
    degrees = int((probabilities > 0).sum()) - 1
    assert chi_square(draws(LOGITS, 4000, **sampling), probabilities) < CRITICAL[degrees]


def test_draws_along_one_sequence_follow_the_softmax_too() -> None:
    probabilities = np.exp(LOGITS.astype(np.float64)) / np.exp(LOGITS.astype(np.float64)).sum()
    history, sampling = np.zeros(4000, dtype=np.int32), Sampling(temperature=1.0, seed=77)
    observed = [choose(LOGITS, history[:length], 0, sampling) for length in range(4000)]
    assert chi_square(observed, probabilities) < CRITICAL[7]


def test_the_definition_argmax_of_scaled_logits_plus_noise() -> None:
    history, sampling = ids(4, 2, 6), Sampling(temperature=0.7, seed=2**64 - 1)
    scores = LOGITS / np.float32(0.7) + noise.gumbel(noise.key(2**64 - 1, 3), np.arange(8))
    assert choose(LOGITS, history, 1, sampling) == scores.argmax()


# Filters


@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.4}, [1]),  # a mass of exactly p is enough
        ({"top_p": 0.41}, [1, 2]),  # the id that crosses p stays
        ({"top_p": 0.7}, [1, 2]),
        ({"top_p": 1e-9}, [1]),
        ({"top_p": 0.999}, [0, 1, 2, 3]),
        ({"min_p": 0.51}, [1, 2]),
        ({"min_p": 0.49}, [0, 1, 2]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.57}, [1]),  # of what top-k left, .4 / .7 = .571 is enough
        ({"top_k": 2, "top_p": 0.58}, [1, 2]),
        ({"top_p": 0.7, "min_p": 0.76}, [1]),
    ],
)
def test_each_filter_works_on_what_the_one_before_left(sampling: dict[str, float], left: list[int]) -> None:
    probabilities = np.array([0.2, 0.4, 0.3, 0.1])
    scaled = np.log(probabilities * (1 + 1e-6 * np.array([-1, 1, 0, 0]))).astype(np.float32)
    assert keep(scaled, Sampling(**sampling)).tolist() == left  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        ({"top_k": 2}, [1, 2]),
        ({"top_p": 0.5}, [1, 2]),
        ({"top_p": 0.3}, [1, 2]),
        ({"min_p": 1.0}, [1, 2, 3, 4]),
    ],
)
def test_at_a_boundary_among_equals_the_lowest_ids_stay(sampling: dict[str, float], left: list[int]) -> None:
    scaled = fp32(-40.0, 1.0, 1.0, 1.0, 1.0)
    assert keep(scaled, Sampling(**sampling)).tolist() == left  # type: ignore[arg-type]


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30),
    st.integers(0, 40),
    st.floats(0.0, 1.0, exclude_min=True),
    st.floats(0.0, 1.0),
)
def test_filters_never_leave_nothing_and_always_the_most_likely(
    values: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    scaled = fp32(*values)
    left = keep(scaled, Sampling(top_k=top_k, top_p=top_p, min_p=min_p))
    assert int(scaled.argmax()) in left
    assert sorted(set(left.tolist())) == left.tolist()
    assert scaled[left].min() >= np.delete(scaled, left).max(initial=-np.inf)


# Penalties, bias, stop ids


def test_the_repetition_penalty_sees_prompt_and_output_and_pushes_both_signs_down() -> None:
    got = adjust(fp32(2, -2, 2, -2), ids(0, 1, 1), 2, Sampling(repetition_penalty=2.0))
    assert got.tolist() == [1, -4, 2, -2]


def test_presence_and_frequency_see_the_output_alone() -> None:
    history = ids(0, 1, 2, 2, 3, 2)
    got = adjust(fp32(0, 0, 0, 0), history, 3, Sampling(presence_penalty=0.5, frequency_penalty=0.25))
    assert got.tolist() == [0, 0, -1, -0.75]


def test_negative_penalties_reward() -> None:
    assert adjust(fp32(0, 0), ids(1), 0, Sampling(presence_penalty=-1.0)).tolist() == [0, 1]


def test_penalties_come_in_their_order_and_bias_last() -> None:
    sampling = Sampling(
        repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0, logit_bias=((0, 3.0), (1, -1.0))
    )
    assert adjust(fp32(4, 0), ids(0), 0, sampling).tolist() == [4 / 2 - 1 - 1 + 3, -1]


def test_adjusting_leaves_the_raw_logits_alone() -> None:
    raw = fp32(1, 2)
    adjust(raw, ids(0), 0, Sampling(repetition_penalty=2.0, logit_bias=((1, 5.0),)))
    assert raw.tolist() == [1, 2]


def test_stop_ids_are_masked_until_min_tokens_tokens_of_output_exist() -> None:
    sampling, logits = Sampling(stop_token_ids=(2, 3), min_tokens=2), fp32(0, 1, 9, 8)
    chosen = [choose(logits, ids(2, 2, 2, 1, 1, 1)[:length], 3, sampling) for length in range(2, 7)]
    assert chosen == [1, 1, 1, 2, 2]


def test_no_bias_can_undo_the_stop_mask() -> None:
    sampling = Sampling(stop_token_ids=(1,), min_tokens=1, logit_bias=((1, 1000.0),))
    assert choose(fp32(0, 0), NONE, 0, sampling) == 0


def test_a_mask_that_would_leave_no_token_gives_way() -> None:
    sampling = Sampling(stop_token_ids=(0, 1), min_tokens=5)
    assert choose(fp32(0, 3), NONE, 0, sampling) == 1
    assert choose(fp32(0, 3), NONE, 0, replace(sampling, temperature=1.0, top_k=1)) == 1


def test_a_masked_id_is_never_drawn() -> None:
    sampling = {"temperature": 5.0, "stop_token_ids": (0,), "min_tokens": 1}
    assert 0 not in draws(LOGITS, 500, **sampling)


# Greedy, ties, temperature


def test_temperature_0_takes_the_lowest_of_the_most_likely_whatever_the_seed() -> None:
    assert {choose(fp32(1, 3, 3, 3), NONE, 0, Sampling(seed=seed)) for seed in range(20)} == {1}


def test_tiny_temperatures_stay_finite_and_all_but_greedy() -> None:
    for temperature in (1e-4, 1e-30, 5e-324):
        assert set(draws(LOGITS * 100, 20, temperature=temperature)) == {0}


def test_huge_temperatures_are_uniform() -> None:
    assert chi_square(draws(LOGITS, 4000, temperature=1e30), np.full(8, 1 / 8)) < CRITICAL[7]


# Rows


ROW_SAMPLINGS = st.one_of(
    st.builds(Sampling, seed=st.integers(0, 2**64 - 1), temperature=st.sampled_from([0.0, 0.3, 1.0, 1e-9])),
    st.builds(
        Sampling,
        seed=st.integers(0, 2**64 - 1),
        temperature=st.sampled_from([0.0, 0.8]),
        top_k=st.sampled_from([0, 3]),
        top_p=st.sampled_from([1.0, 0.7]),
        min_p=st.sampled_from([0.0, 0.2]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.4]),
        frequency_penalty=st.sampled_from([0.0, -0.2]),
        logit_bias=st.sampled_from([(), ((2, 1.5), (4, -3.0))]),
        logprobs=st.sampled_from([None, 0, 3]),
        stop_token_ids=st.sampled_from([(), (5, 6)]),
        min_tokens=st.sampled_from([0, 4]),
    ),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, list[ForwardRow]]:
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        history = draw(st.lists(st.integers(0, 8), min_size=1, max_size=8))
        start = draw(st.integers(0, len(history) - 1))
        rows.append(
            make_row(
                history,
                [1],
                start=start,
                outputs=draw(st.sampled_from([0, 1, len(history) - start])),
                output=draw(st.sampled_from(OutputMode)),
                sampling=draw(ROW_SAMPLINGS),
                prompt_length=draw(st.integers(1, len(history))),
                top_k=draw(st.integers(1, 12)),
            )
        )
    total = sum(row.outputs for row in rows)
    logits = np.random.default_rng(draw(st.integers(0, 10_000))).normal(0, 2, (total, 9)).astype(np.float32)
    if total and draw(st.booleans()):
        logits[draw(st.integers(0, total - 1)), draw(st.integers(0, 8))] = draw(
            st.sampled_from([np.nan, np.inf, -np.inf])
        )
    return logits, rows


def same(a: RowOutput, b: RowOutput) -> bool:
    fields = ("tokens", "logprobs", "top_ids", "top_logprobs", "logits")
    pairs = [(getattr(a, name), getattr(b, name)) for name in fields]
    return a.finite == b.finite and all(
        (x is None) == (y is None) and (x is None or np.array_equal(x, y)) for x, y in pairs
    )


@settings(max_examples=300, deadline=None)
@given(batches())
def test_a_batch_gives_each_row_what_it_gets_alone(batch: tuple[np.ndarray, list[ForwardRow]]) -> None:
    logits, rows = batch
    results, first = sample_rows(logits, rows), 0
    assert len(results) == len(rows)
    for row, result in zip(rows, results, strict=True):
        alone = logits[first : first + row.outputs]
        assert same(result, sample(alone, row))
        assert result.finite == bool(np.isfinite(alone).all())
        first += row.outputs


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(top_k=2, logprobs=1)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_fail_their_row_alone(sampling: Sampling, bad: float) -> None:
    row = make_row([1, 2], [1], output=OutputMode.SAMPLE, sampling=sampling)
    logits = np.stack([LOGITS, LOGITS, LOGITS])
    logits[1, 6] = bad
    before, failed, after = sample_rows(logits, [row, row, row])
    assert failed.tokens is None
    assert not failed.finite
    assert same(before, after)
    assert before.finite


def test_the_output_at_position_p_is_keyed_by_p_plus_1_and_sees_history_to_p() -> None:
    sampling = Sampling(temperature=1.0, seed=5, presence_penalty=1.0)
    row = make_row(
        [3, 1, 4, 1], [1], start=1, outputs=3, output=OutputMode.SAMPLE, sampling=sampling, prompt_length=2
    )
    logits = np.stack([LOGITS, LOGITS[::-1], LOGITS])
    expected = [choose(logits[i], row.history[: i + 2], 2, sampling) for i in range(3)]
    assert present(sample(logits, row).tokens).tolist() == expected


def test_logprobs_are_of_the_raw_logits() -> None:
    sampling = Sampling(logit_bias=((6, 100.0),), temperature=0.1, logprobs=2)
    output = sample(LOGITS[None], make_row([1], [1], output=OutputMode.SAMPLE, sampling=sampling))
    raw = np.log(np.exp(LOGITS.astype(np.float64)) / np.exp(LOGITS.astype(np.float64)).sum())
    assert present(output.tokens).tolist() == [6]
    np.testing.assert_allclose(present(output.logprobs), [raw[6]], rtol=1e-6)
    assert present(output.top_ids).tolist() == [[0, 5]]
    np.testing.assert_allclose(present(output.top_logprobs), [[raw[0], raw[5]]], rtol=1e-6)
    assert present(output.logprobs).dtype == present(output.top_logprobs).dtype == np.float32


def test_top_logprobs_list_equals_by_id_and_no_more_than_the_vocabulary() -> None:
    row = make_row([1], [1], output=OutputMode.TOP_K, top_k=99)
    output = sample(fp32(1, 2, 2, 1)[None], row)
    assert present(output.top_ids).tolist() == [[1, 2, 0, 3]]
    assert output.tokens is None


def test_log_softmax_survives_large_logits() -> None:
    got = log_softmax(fp32(3e38, -3e38, 3e38))
    np.testing.assert_allclose(got, [-math.log(2), float(np.finfo(np.float32).min), -math.log(2)])
