"""Picking on the device gives the very token that the sampler gives, and says which rows are finite."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_service.backends.base import ForwardRow
from executor_service.backends.torch_backend.cuda.layout.step_buffer import PickRows
from executor_service.backends.torch_backend.cuda.picking import pick as triton_pick
from executor_service.backends.torch_backend.cuda.picking.exclude import exclude_launch
from executor_service.backends.torch_backend.cuda.picking.likelihood import gumbel_noise
from executor_service.backends.torch_backend.cuda.picking.pick import pick
from executor_service.backends.torch_backend.ops import drawing
from executor_service.backends.torch_backend.ops.kernels import PlainKernels
from executor_service.backends.torch_backend.ops.sampler import sample
from executor_service.contract import noise
from executor_service.contract.masks import mask_bytes
from executor_service.contract.plan import MIN_TEMPERATURE, OutputMode, Sampling
from tests.unit.executor.rows import make_row

PLAIN = PlainKernels(torch.device("cpu"), torch.float32)
LENGTH = 7


def f32(value: float) -> float:
    """As the proto carries it."""
    return float(np.float32(value))


def packed(samplings: Sequence[Sampling]) -> torch.Tensor:
    """The rows' parameters as six times as many int32, as a plan carries them."""
    keys = np.array([noise.key(s.seed, LENGTH) for s in samplings], np.uint64)
    floors = [0.0 if s.temperature == 0 else max(s.temperature, MIN_TEMPERATURE) for s in samplings]
    fields = [
        np.array(floors, np.float32),
        keys.astype(np.uint32),
        (keys >> np.uint64(32)).astype(np.uint32),
        np.array([s.top_k for s in samplings], np.int32),
        np.array([s.top_p for s in samplings], np.float32),
        np.array([s.min_p for s in samplings], np.float32),
    ]
    return torch.from_numpy(np.stack([field.view(np.int32) for field in fields]))


def picked(logits: torch.Tensor, plan: torch.Tensor) -> tuple[list[int], list[int]]:
    """Tokens and finite flags; parameters are views into one buffer."""
    temperatures, lows, highs, top_ks, top_ps, min_ps = plan
    rows = PickRows(
        temperatures.view(torch.float32), lows, highs, top_ks,
        top_ps.view(torch.float32), min_ps.view(torch.float32),
    )  # fmt: skip
    tokens, finite = torch.full((2, len(logits)), -7, dtype=torch.int32)
    small = mock.patch.multiple(triton_pick, CHUNK=128, _SURVEY_TILE=64, _PICK_TILE=64)
    with warnings.catch_warnings(), small if logits.shape[1] < 1000 else nullcontext():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of NaN and infinity
        pick(logits, rows, tokens, finite)
    return tokens.tolist(), finite.tolist()


def expected(logits: torch.Tensor, samplings: Sequence[Sampling]) -> list[int]:
    rows: list[ForwardRow] = [
        make_row([1] * LENGTH, [], start=LENGTH - 1, output=OutputMode.SAMPLE, sampling=s) for s in samplings
    ]
    outs = sample(logits, rows, PLAIN)
    return [int(out.tokens[0]) for out in outs if out.tokens is not None]


def assert_picked(logits: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    tokens, finite = picked(logits, packed(samplings))
    assert tokens == expected(logits, samplings)
    assert finite == [1] * len(samplings)


parameters = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-6, 0.01, 0.3, 0.8, 1.0, 2.5, 5.0]).map(f32),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 20, 60, 96, 97, 500]),
    top_p=st.sampled_from([1e-9, 0.01, 0.1, 0.5, 0.8, 0.95, 1.0, 1.0]).map(f32),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0]).map(f32),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    st.lists(parameters, min_size=1, max_size=4),
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 97, 97, 97, 140]),
    st.sampled_from([0.0, 0.1, 1.0, 6.0]),
    st.sampled_from([None, 1, 0.125]),
)
def test_any_rows(
    samplings: list[Sampling], seed: int, vocabulary: int, spread: float, grain: float | None
) -> None:
    logits = np.random.default_rng(seed).standard_normal((len(samplings), vocabulary)) * spread
    if grain is not None:
        logits = np.round(logits / grain) * grain  # ties, zeros of both signs
    assert_picked(torch.from_numpy(logits.astype(np.float32)), samplings)


@triton.jit  # type: ignore[untyped-decorator]
def _noise_kernel(out, low, high, lanes: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.arange(0, lanes)
    tl.store(out + token, gumbel_noise(low.to(tl.uint32), high.to(tl.uint32), token))


@pytest.mark.parametrize("key", [0, 2**64 - 1, noise.key(3, 4), noise.key(2**63, 99)])
def test_the_noise_is_the_normative_one_to_the_bit(key: int) -> None:
    out = torch.empty(4096)
    _noise_kernel[(1,)](out, key & 0xFFFFFFFF, key >> 32, 4096)
    assert out.numpy().tobytes() == noise.gumbel(key, np.arange(4096)).tobytes()


def test_rows_that_are_not_finite_are_flagged_alone() -> None:
    kinds = [Sampling(), Sampling(temperature=1.0, top_k=5, top_p=f32(0.6))]
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((8, 140)).astype(np.float32))
    clean, _ = picked(logits, packed(kinds * 4))
    for row, bad in ((0, torch.nan), (2, torch.inf), (4, -torch.inf)):
        logits[row, 130] = bad
        logits[row + 1, 0] = bad
    tokens, finite = picked(logits, packed(kinds * 4))
    assert finite == [0] * 6 + [1] * 2
    assert tokens[6:] == clean[6:]
    assert all(0 <= token < 140 for token in tokens)


def test_rows_of_nothing_but_rubbish_give_some_token() -> None:
    kinds = [Sampling(temperature=t, top_k=k, top_p=0.5) for t in (0.0, 1.0) for k in (0, 5)]
    logits = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat_interleave(4)[:, None].repeat(1, 100)
    tokens, finite = picked(logits, packed(kinds * 3))
    assert finite == [0] * 12
    assert all(0 <= token < 100 for token in tokens)


def test_masked_tokens_are_never_picked() -> None:
    samplings = [
        Sampling(temperature=t, top_k=k, top_p=p, seed=t) for t in (0, 5) for k in (0, 8) for p in (0.5, 1)
    ]
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((8, 97)).astype(np.float32))
    logits[:, ::2] = -torch.inf
    tokens, _ = picked(logits, packed(samplings))
    logits[:, ::2] = -1e30
    assert tokens == expected(logits, samplings)


@pytest.mark.parametrize("vocabulary", [31, 97, 1056, 2100])
def test_masks_exclude_what_they_exclude_on_the_host(vocabulary: int) -> None:
    """Some rows have one, in any order."""
    rng = np.random.default_rng(vocabulary)
    masks = rng.integers(0, 256, (3, mask_bytes(vocabulary)), np.uint8)
    wide = torch.from_numpy(rng.standard_normal((5, vocabulary + 5)).astype(np.float32))
    logits, behind = wide[:, :vocabulary], wide[:, vocabulary:].clone()
    host = logits.clone()
    drawing.exclude(host, np.array([4, 0, 3]), masks)
    places = torch.tensor([4, 0, 3], dtype=torch.int32)
    exclude_launch(logits, torch.from_numpy(masks.view(np.int32)), places).run()
    assert torch.equal(logits, host)
    assert torch.equal(wide[:, vocabulary:], behind)


def test_parameters_that_are_rubbish_give_some_token_and_harm_no_other_row() -> None:
    good = [Sampling(temperature=1.0, top_k=9, top_p=f32(0.7), seed=i) for i in range(8)]
    logits = torch.from_numpy(np.random.default_rng(2).standard_normal((8, 97)).astype(np.float32))
    plan = packed(good)
    plan[:, ::2] = torch.from_numpy(
        np.random.default_rng(3).integers(-(2**31), 2**31, (6, 4), dtype=np.int32)
    )
    plan[0, 0], plan[:, 2] = torch.tensor(torch.nan).view(torch.int32), 0
    tokens, finite = picked(logits, plan)
    assert finite == [1] * 8
    assert all(0 <= token < 97 for token in tokens)
    assert tokens[1::2] == expected(logits, good)[1::2]
    assert tokens[2] == int(logits[2].argmax())  # all parameters are zero


def test_a_token_does_not_depend_on_company_or_on_where_the_row_lies() -> None:
    samplings = [Sampling(temperature=1.0, top_p=f32(0.4), seed=i) for i in range(3)]
    wide = torch.from_numpy(np.random.default_rng(4).standard_normal((3, 203)).astype(np.float32))
    together, _ = picked(wide[:, 3:200], packed(samplings))
    for i in range(3):
        assert picked(wide[i : i + 1, 3:200].clone(), packed(samplings[i : i + 1]))[0] == together[i : i + 1]


@pytest.mark.parametrize(("k", "tied"), [(1, 40), (2, 3), (20, 1), (20, 40), (39, 3), (96, 1)])
def test_ties_at_the_border_of_top_k_are_cut_by_id(k: int, tied: int) -> None:
    logits = torch.linspace(3, -3, 97)[torch.randperm(97, generator=torch.Generator().manual_seed(k))]
    border = logits.sort(descending=True).values[k - 1]
    logits[:tied] = border
    samplings = [Sampling(temperature=2.0, top_k=k, top_p=f32(p), seed=k) for p in (0.5, 0.99)]
    assert_picked(logits.repeat(2, 1), samplings)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [(2, 1.0, 0.0, 2), (0, 0.5, 0.0, 2), (0, 0.51, 0.0, 3), (3, 0.6, 0.0, 2), (0, 1.0, 0.95, 2)],
)
def test_not_one_token_more_than_the_filters_leave(top_k: int, top_p: float, min_p: float, kept: int) -> None:
    samplings = [
        Sampling(temperature=1.0, top_k=top_k, top_p=f32(top_p), min_p=f32(min_p), seed=i) for i in range(8)
    ]
    # Equally likely, so that each border is exact; for min_p the highest is not in the last tile.
    row = [0.0, 0.0, -0.1, -0.1, *[-3.0] * 96] if min_p else [0.0] * 4
    logits = torch.tensor(row).repeat(8, 1)
    assert_picked(logits, samplings)
    assert set(expected(logits, samplings)) == set(range(kept))


def test_a_large_vocabulary() -> None:
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((2, 50_257)) * 3).astype(np.float32)
    samplings = [
        Sampling(temperature=f32(0.7), top_p=f32(0.9), min_p=f32(1e-4), seed=2),
        Sampling(temperature=1.0, top_k=300, top_p=f32(0.5), seed=3),
    ]
    assert_picked(torch.from_numpy(logits), samplings)


def test_what_the_kernels_do_not_take_is_refused() -> None:
    out, plan = torch.zeros(2, dtype=torch.int32), packed([Sampling()] * 2)
    with pytest.raises(ValueError, match="fp32"):
        picked(torch.zeros(2, 9, dtype=torch.float64), plan)
    with pytest.raises(ValueError, match="contiguous tokens"):
        picked(torch.zeros(9, 2).T, plan)
    with pytest.raises(ValueError, match=r"3 rows .* torch.float32 \[3\]"):
        picked(torch.zeros(3, 9), plan)
    with pytest.raises(ValueError, match="rows is not contiguous"):
        pick(torch.zeros(2, 9), PickRows(*[plan[0].view(torch.float32)] * 6), out, out)
