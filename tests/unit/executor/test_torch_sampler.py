"""The torch sampler picks the tokens of the numpy reference, and never by luck of its batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from executor_service.backends import numpy_sampler
from executor_service.backends.base import ForwardRow
from executor_service.backends.torch_backend.cpu.kernels import CpuKernels
from executor_service.backends.torch_backend.cpu.rowwise import sampling as cpu_sampler
from executor_service.backends.torch_backend.ops import drawing, sampler
from executor_service.contract import noise as reference_noise
from executor_service.contract.masks import Masks, allowed_tokens, mask_bytes
from executor_service.contract.plan import OutputMode, Sampling
from tests.support.untyped import present

VOCABULARY = 97
CPU = CpuKernels(2)

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-9, 0.3, 0.8, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 96, 97, 500]),
    top_p=st.sampled_from([0.0, 0.01, 0.3, 0.5, 0.9, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, -0.5, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.1]),
    logit_bias=st.lists(st.tuples(st.integers(0, 96), st.floats(-20, 20, width=32)), max_size=4).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, 0, 1, 5]),
    stop_token_ids=st.lists(st.integers(0, 96), max_size=3, unique=True).map(tuple),
    min_tokens=st.integers(0, 6),
)


def packed(allowed: np.ndarray) -> Masks:
    """Masks as `contract.masks` has them."""
    bits = np.zeros((len(allowed), 8 * mask_bytes(VOCABULARY)), np.bool_)
    bits[:, :VOCABULARY] = allowed
    return np.packbits(bits, axis=-1, bitorder="little")


@st.composite
def sampled_rows(draw: st.DrawFn) -> tuple[np.ndarray, list[ForwardRow]]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        history = rng.integers(0, VOCABULARY, draw(st.integers(1, 30))).astype(np.int32)
        fed = draw(st.integers(1, len(history)))
        output = draw(st.sampled_from([OutputMode.SAMPLE] * 5 + list(OutputMode)))
        outputs = 0 if output is OutputMode.HIDDEN else draw(st.sampled_from([0, 1, fed]))
        masks = None
        if output is OutputMode.SAMPLE and draw(st.booleans()):
            allowed = rng.random((outputs, VOCABULARY)) < draw(st.sampled_from([0.02, 0.5, 0.9]))
            allowed[np.arange(outputs), rng.integers(0, VOCABULARY, outputs)] = True
            masks = packed(allowed)
        rows.append(
            ForwardRow(
                start=len(history) - fed,
                tokens=history[-fed:],
                history=history,
                prompt_length=draw(st.integers(0, len(history))),
                block_table=np.zeros(0, np.int32),
                outputs=outputs,
                output=output,
                sampling=draw(samplings),
                top_k=draw(st.sampled_from([1, 3, 97])),
                masks=masks,
            )
        )
    logits = rng.standard_normal((sum(row.outputs for row in rows), VOCABULARY)) * draw(
        st.sampled_from([0.1, 1.0, 6.0])
    )
    if draw(st.booleans()):
        logits = np.round(logits)  # ties everywhere
    return logits.astype(np.float32), rows


@settings(deadline=None, max_examples=100)
@given(sampled_rows())
def test_equals_the_numpy_reference(case: tuple[np.ndarray, list[ForwardRow]]) -> None:
    logits, rows = case
    given_logits = torch.from_numpy(logits.copy())
    ours = sampler.sample(given_logits, rows, CPU)
    ends = np.cumsum([row.outputs for row in rows]).tolist()
    for row, end in zip(rows, ends, strict=True):  # raw logits stay raw where somebody reads them afterwards
        span = slice(end - row.outputs, end)
        is_read = row.output is not OutputMode.SAMPLE or row.sampling.logprobs is not None
        if is_read or (sampler.is_plain(row) and row.masks is None):
            assert np.array_equal(given_logits[span].numpy(), logits[span])
    for out, expected in zip(ours, numpy_sampler.sample_rows(logits, rows), strict=True):
        assert out.finite == expected.finite
        for name in ("tokens", "top_ids"):
            a, b = getattr(out, name), getattr(expected, name)
            assert (a is None) == (b is None) or len(b) == 0
            assert a is None or (a.dtype == np.int32 and a.tolist() == b.tolist())
        for name in ("logprobs", "top_logprobs", "logits"):
            a, b = getattr(out, name), getattr(expected, name)
            assert a is None or np.allclose(a, b, atol=2e-5)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32), st.integers(1, 150), st.integers(1, 6))
def test_masking_in_plain_torch_equals_the_cpu_kernel(seed: int, vocabulary: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    places = rng.permutation(rows)[: rng.integers(1, rows + 1)]
    words = rng.choice(np.array([0, 2**32 - 1, *rng.integers(0, 2**32, 3)], np.uint32), (len(places), 6))
    masks = words.view(np.uint8)[:, : mask_bytes(vocabulary) + 4 * int(rng.integers(0, 2))].copy()
    logits = rng.standard_normal((rows, vocabulary)).astype(np.float32)
    ours, plain = torch.from_numpy(logits.copy()), torch.from_numpy(logits.copy())
    with CPU.step():
        CPU.exclude(ours, places, masks)
    drawing.exclude(plain, places, masks)
    expected = logits.copy()
    expected[places] = np.where(allowed_tokens(masks, vocabulary), logits[places], -np.inf)
    assert np.array_equal(ours.numpy(), expected)
    assert np.array_equal(plain.numpy(), expected)


@settings(deadline=None, max_examples=80)
@given(sampled_rows())
def test_drawing_in_plain_torch_equals_the_cpu_kernel(case: tuple[np.ndarray, list[ForwardRow]]) -> None:
    logits = case[0]
    if not len(logits):
        return
    rng = np.random.default_rng(int(np.abs(logits[0]).sum() * 1e4))
    n = len(logits)
    temperatures = rng.choice([0.5, 1.0, 2.0], n).astype(np.float32)
    keys = rng.integers(0, 2**64, n, dtype=np.uint64)
    filters = drawing.Filters(
        top_k=rng.choice([1, 5, VOCABULARY], n),
        top_p=rng.choice([0.0, 0.1, 0.7, 1.0], n),
        min_p=rng.choice([0.0, 0.05, 1.0], n),
        totals=np.zeros(n),
    )
    given_logits = torch.from_numpy(logits)
    with CPU.step():
        tokens = CPU.draw(given_logits, temperatures, keys, filters)
    assert drawing.draw(given_logits, temperatures, keys, filters).tolist() == tokens.tolist()


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50))
def test_the_hash_is_the_normative_one_bit_for_bit(key: int, ids: list[int]) -> None:
    expected = reference_noise.hash_tokens(key, np.array(ids))
    keys = torch.from_numpy(np.array([[key]], np.uint64).view(np.int64))
    assert drawing.hash_tokens(keys, torch.tensor([ids]))[0].tolist() == expected.tolist()
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    assert _compiled_hashes(low, high, np.array(ids)).tolist() == expected.tolist()


@njit
def _compiled_hashes(low: np.uint32, high: np.uint32, ids: np.ndarray) -> np.ndarray:
    out = np.empty(len(ids), np.uint32)
    for i in range(len(ids)):
        out[i] = cpu_sampler.hash_token(low, high, ids[i])
    return out


def _row(sampling: Sampling, length: int = 5, outputs: int = 1) -> ForwardRow:
    tokens = np.arange(length, dtype=np.int32)
    return ForwardRow(0, tokens, tokens, length, np.zeros(0, np.int32), outputs, OutputMode.SAMPLE, sampling)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9, logprobs=3)])
def test_a_row_that_is_not_finite_is_reported_alone(bad: float, sampling: Sampling) -> None:
    logits = np.random.default_rng(0).standard_normal((4, VOCABULARY)).astype(np.float32)
    rows = [_row(sampling), _row(sampling, outputs=2), _row(sampling)]
    clean = sampler.sample(torch.from_numpy(logits.copy()), rows, CPU)
    logits[2, 50] = bad
    outs = sampler.sample(torch.from_numpy(logits), rows, CPU)
    assert [out.finite for out in outs] == [True, False, True]
    for i in (0, 2):
        assert present(outs[i].tokens).tolist() == present(clean[i].tokens).tolist()


def test_a_masked_row_is_plain_and_not_greedy() -> None:
    """Ranks exchange the logits of such rows, not their best ids; a device can't pick them by itself."""
    plain = _row(Sampling())
    masked = replace(plain, masks=np.ones((1, 16), np.uint8))
    assert sampler.is_greedy(plain)
    assert sampler.is_plain(masked)
    assert not sampler.is_greedy(masked)


@pytest.mark.parametrize("spread", [0.5, 3.0, 9.0])
def test_large_vocabulary_noise_is_pruned_exactly(spread: float) -> None:
    rng = np.random.default_rng(int(spread))
    logits = (rng.standard_normal((24, 49_152)) * spread).astype(np.float32)
    rows = [
        _row(Sampling(temperature=t, top_p=p, min_p=m, top_k=k, seed=i), length=i + 1)
        for i, (t, p, m, k) in enumerate(
            (t, p, m, k) for t in (0.7, 1.3) for p in (0.2, 0.95, 1.0) for m in (0.0, 0.1) for k in (0, 50)
        )
    ]
    ours = sampler.sample(torch.from_numpy(logits), rows, CPU)
    theirs = numpy_sampler.sample_rows(logits, rows)
    for out, expected in zip(ours, theirs, strict=True):
        assert out.tokens is not None
        assert expected.tokens is not None
        assert out.tokens.tolist() == expected.tokens.tolist()


def test_ranked_gives_ties_to_the_lowest_id() -> None:
    values = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0], [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]])
    top, ids = sampler.ranked(values, 3)
    assert ids.tolist() == [[1, 3, 2], [0, 1, 2]]
    assert top.tolist() == [[3.0, 3.0, 2.0], [5.0, 5.0, 5.0]]
