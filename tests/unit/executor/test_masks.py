"""Masks of rows: whole steps over the oracle sample what they allow, at the position they are for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_service.backends.numpy_sampler import sample
from executor_service.backends.oracle_backend.oracle import OracleBackend
from executor_service.contract.masks import Masks, allowed_tokens, mask_bytes, read_masks
from executor_service.contract.plan import OutputMode, Row, Sampling
from tests.unit.executor.fakes import limits
from tests.unit.executor.harness import Harness, opening, row
from tests.unit.executor.rows import make_row

VOCABULARY = 257
PROMPT = [5, 6, 7, 8, 9]


def masks_of(*allowed: set[int]) -> Masks:
    """One mask for each set of tokens."""
    bits = np.zeros((len(allowed), 8 * mask_bytes(VOCABULARY)), np.uint8)
    for position, tokens in enumerate(allowed):
        bits[position, sorted(tokens)] = 1
    return np.packbits(bits, axis=-1, bitorder="little")


ANY = set(range(VOCABULARY))


def masked(plain: Row, *allowed: set[int]) -> Row:
    return replace(plain, masks=masks_of(*allowed))


@pytest.fixture
def h() -> Harness:
    return Harness(limits(vocab_size=VOCABULARY), OracleBackend())


@given(st.sets(st.integers(0, VOCABULARY - 1)), st.binary(min_size=36, max_size=36))
def test_packed_masks_are_read_bit_by_bit_and_not_beyond_the_vocabulary(
    tokens: set[int], noise: bytes
) -> None:
    (mask,) = masks_of(tokens)
    both = mask.tobytes() + noise
    first, second = read_masks(both, 2, VOCABULARY)
    assert set(np.flatnonzero(allowed_tokens(first, VOCABULARY)).tolist()) == tokens
    assert first.tobytes() == mask.tobytes()
    assert allowed_tokens(second, VOCABULARY).sum() == sum(byte.bit_count() for byte in second.tolist())


@given(
    st.sets(st.integers(0, VOCABULARY - 1), min_size=1),
    st.sampled_from(
        [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 3}, {"temperature": 2.0, "top_p": 0.5}]
    ),
    st.integers(0, 2**32),
)
def test_a_masked_token_is_the_one_of_a_smaller_vocabulary(
    tokens: set[int], rules: dict[str, float], seed: int
) -> None:
    """Whatever is excluded has no share in filters, noise or choice."""
    logits = np.random.default_rng(seed).standard_normal((1, VOCABULARY)).astype(np.float32)
    plain = make_row(PROMPT, [1], sampling=Sampling(seed=seed, **rules), output=OutputMode.SAMPLE)  # type: ignore[arg-type]
    chosen = sample(logits, replace(plain, masks=masks_of(tokens))).tokens
    gone = np.full_like(logits, -1e30)
    gone[0, sorted(tokens)] = logits[0, sorted(tokens)]
    assert chosen is not None
    assert chosen.tolist() == sample(gone, plain).tokens.tolist()  # type: ignore[union-attr]
    assert set(chosen.tolist()) <= tokens


def test_the_mask_of_stop_ids_gives_way_and_a_rows_mask_does_not() -> None:
    logits = np.zeros((1, VOCABULARY), np.float32)
    held = Sampling(stop_token_ids=(3, 4), min_tokens=9)
    plain = make_row(PROMPT, [1], sampling=held, output=OutputMode.SAMPLE)
    for allowed, expected in (({4}, 4), ({3, 4}, 3), ({3, 7}, 7)):
        tokens = sample(logits, replace(plain, masks=masks_of(allowed))).tokens
        assert tokens is not None
        assert tokens.tolist() == [expected]


def test_logprobs_are_of_the_raw_logits_under_a_mask_too() -> None:
    logits = np.random.default_rng(1).standard_normal((1, VOCABULARY)).astype(np.float32)
    plain = make_row(PROMPT, [1], sampling=Sampling(logprobs=2), output=OutputMode.SAMPLE)
    free, bound = sample(logits, plain), sample(logits, replace(plain, masks=masks_of({200})))
    assert bound.logprobs is not None
    assert bound.logprobs[0] == pytest.approx(logits[0, 200] - np.log(np.exp(logits[0]).sum()), abs=1e-5)
    assert np.array_equal(free.top_ids, bound.top_ids)  # type: ignore[arg-type]


def test_a_row_samples_what_its_mask_allows_and_its_neighbours_anything(h: Harness) -> None:
    free = [h.row(opening(10 + i, PROMPT, seed=i)).tokens for i in range(3)]
    for i in range(3):
        h.row(opening(i + 1, PROMPT, seed=i))
    undisturbed = h.step(*[row(10 + i, 5) for i in range(3)]).rows
    result = h.step(row(1, 5), masked(row(2, 5), {77}), row(3, 5)).rows
    assert result[1].tokens == [77]
    assert [result[i].tokens for i in (0, 2)] == [undisturbed[i].tokens for i in (0, 2)]
    assert free[0] != [77]


def test_each_position_of_a_verification_has_its_own_mask(h: Harness) -> None:
    h.row(opening(1, PROMPT))
    drafts = masked(row(1, 5, drafts=[20, 30, 40]), {20}, {30}, {41}, {50})
    assert h.row(drafts).tokens == [20, 30, 41]
    assert h.row(masked(row(1, 8, drafts=[60]), {60}, {70})).tokens == [60, 70]


def test_a_draft_behind_which_nothing_is_allowed_is_not_accepted(h: Harness) -> None:
    """The row emits what it would have without that draft; then its client knows where it stands."""
    h.row(opening(1, PROMPT))
    result = h.row(masked(row(1, 5, drafts=[20, 30, 40]), {20}, {30}, set(), {50}))
    assert (result.tokens, result.kv_length) == ([20, 30], 7)
    assert h.row(masked(row(1, 7), {9})).tokens == [9]


def test_the_mask_of_an_opening_is_for_the_token_that_it_samples(h: Harness) -> None:
    whole = replace(opening(1, PROMPT), mask=masks_of({99}))
    assert h.row(whole).tokens == [99]
    chunk = replace(opening(2, [*PROMPT[::-1], 3], 2), mask=masks_of({99}))
    assert h.row(chunk).tokens == []
    assert h.row(masked(row(2, 2, limit=2), {98})).tokens == []
    assert h.row(masked(row(2, 4), {97})).tokens == [97]


def test_a_masked_step_in_pieces_applies_the_mask_once(h: Harness) -> None:
    small = Harness(limits(vocab_size=VOCABULARY, max_piece_tokens=2), OracleBackend())
    assert small.row(replace(opening(1, PROMPT), mask=masks_of({99}))).tokens == [99]
    assert small.row(masked(row(1, 5, drafts=[20, 30, 40]), {20}, {30}, {41}, {50})).tokens == [20, 30, 41]
