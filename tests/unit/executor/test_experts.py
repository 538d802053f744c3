"""Grouped experts compute what experts one after the other do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from executor_service.backends.torch_backend.files.architecture.activation import Activation, sigmoid
from executor_service.backends.torch_backend.files.architecture.spec import MoeSpec
from executor_service.backends.torch_backend.model.experts import (
    EachExpert,
    GatedWeights,
    GroupedExperts,
    experts,
)
from executor_service.backends.torch_backend.ops.kernels import PlainKernels
from executor_service.backends.torch_backend.ops.stacked_experts import (
    route,
    route_corrected,
    sum_experts,
)

SILU = Activation.SILU
CPU = torch.device("cpu")
HIDDEN, COUNT = 32, 7
MOE = MoeSpec(COUNT, 3, 24, True, frozenset({0}))
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}


def read(i: int, inner: int = 24) -> GatedWeights:
    generator = torch.Generator().manual_seed(i)
    gate, up, down = (torch.randn(inner, HIDDEN, generator=generator) / 6 for _ in range(3))
    return GatedWeights(gate, up, down.T.contiguous())


def grouping(dtype: torch.dtype) -> PlainKernels:
    kernels = PlainKernels(CPU, dtype)
    kernels.sum_experts = sum_experts
    return kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 19])
def test_grouped_is_one_after_the_other(tokens: int, dtype: torch.dtype) -> None:
    kernels = grouping(dtype)
    x = torch.randn(tokens, HIDDEN).to(dtype)
    shares, chosen = route(torch.rand(tokens, COUNT), 3, renormalize=False)
    grouped, each = GroupedExperts(kernels, MOE, HIDDEN, SILU, read), EachExpert(kernels, MOE, SILU, read)
    torch.testing.assert_close(
        grouped(x, shares, chosen), each(x, shares, chosen), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    assert grouped.bytes() == each.bytes()


def test_a_correction_changes_who_is_chosen_and_not_the_shares() -> None:
    logits = torch.tensor([[0.0, 2.0, -1.0, 1.0], [torch.nan] * 4])
    correction = torch.tensor([0.9, 0.0, -0.5, 0.0])
    shares, chosen = route_corrected(logits, correction, 2, renormalize=True, scale=2.0)
    zero, two = torch.sigmoid(logits[0, :2])
    torch.testing.assert_close(shares[0], 2 * torch.stack([zero, two]) / (zero + two))
    assert chosen[0].tolist() == [0, 1]
    assert len(set(chosen[1].tolist()) & set(range(4))) == 2  # places in memory, even of NaN


def test_experts_that_nobody_chose_and_one_that_all_did() -> None:
    kernels = grouping(torch.float32)
    x, chosen = torch.randn(5, HIDDEN), torch.full((5, 1), COUNT - 1)
    shares = torch.rand(5, 1)
    out = GroupedExperts(kernels, MOE, HIDDEN, SILU, read)(x, shares, chosen)
    gate, up, down, *_ = read(COUNT - 1)
    assert isinstance(gate, torch.Tensor)
    assert isinstance(up, torch.Tensor)
    assert isinstance(down, torch.Tensor)
    expected = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T * shares
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_shares_follow_from_all_logits_or_from_those_of_the_chosen() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0], [3.0, 1.0, 1.5, 4.0]])
    shares, chosen = route(logits.bfloat16(), 2, renormalize=False)
    assert chosen.tolist() == [[1, 2], [0, 3]]
    torch.testing.assert_close(shares, logits.softmax(-1).gather(-1, chosen))
    shares, _ = route(logits, 2, renormalize=True)
    torch.testing.assert_close(shares, logits.gather(-1, chosen).softmax(-1))


def test_a_nan_stays_in_its_own_row() -> None:
    x = torch.randn(4, HIDDEN)
    x[2] = torch.nan
    shares, chosen = route(torch.rand(4, COUNT), 2, renormalize=False)
    out = GroupedExperts(grouping(torch.float32), MOE, HIDDEN, SILU, read)(x, shares, chosen)
    assert out.isnan().any(-1).tolist() == [False, False, True, False]


def test_only_aligned_experts_are_grouped_and_only_where_it_pays() -> None:
    assert isinstance(experts(PlainKernels(CPU, torch.bfloat16), MOE, HIDDEN, SILU, read), EachExpert)
    kernels = grouping(torch.bfloat16)
    assert isinstance(experts(kernels, MOE, HIDDEN, SILU, read), GroupedExperts)
    odd = replace(MOE, intermediate_size=12)
    assert isinstance(experts(kernels, odd, HIDDEN, SILU, lambda i: read(i, 12)), EachExpert)


@pytest.mark.parametrize("columns", [1, 3, 4, 8, 60])
def test_a_row_has_the_same_sigmoids_alone_and_among_others(columns: int) -> None:
    x = torch.randn(67, columns, generator=torch.Generator().manual_seed(columns))
    alone = torch.cat([sigmoid(row[None].clone()) for row in x])
    assert torch.equal(alone, sigmoid(x))
    assert torch.allclose(alone, torch.sigmoid(x), atol=1e-6)
