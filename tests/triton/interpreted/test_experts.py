"""Experts in Triton, interpreted, compute what plain torch does."""

from __future__ import annotations

import pytest
import torch

from executor_service.backends.torch_backend.cuda.linear import experts as cuda_experts
from executor_service.backends.torch_backend.cuda.linear.experts import (
    ExpertGroups,
    group_launches,
    sum_experts,
)
from executor_service.backends.torch_backend.cuda.linear.skinny_gemm import MAX_ROWS
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.ops import stacked_experts
from executor_service.backends.torch_backend.ops.stacked_experts import StackedExperts

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}
INNER = 24


def chosen_of(tokens: int, experts: int, count: int) -> torch.Tensor:
    """Some experts of each token, in the order of their numbers."""
    return torch.rand(tokens, experts).topk(count).indices.sort(-1).values


def weights(experts: int, hidden: int, dtype: torch.dtype, activation: Activation) -> StackedExperts:
    gate_up, down = torch.randn(experts, 2 * INNER, hidden), torch.randn(experts, hidden, INNER)
    return StackedExperts((gate_up / hidden**0.5).to(dtype), (down / 6).to(dtype), activation)


# One token; several blocks of pairs; all experts, and several blocks of columns.
@pytest.mark.parametrize(
    ("tokens", "experts", "count", "hidden"), [(1, 8, 2, 24), (41, 5, 3, 8), (3, 4, 4, 520), (2, 9, 1, 8)]
)
def test_rows_are_grouped_by_expert_in_the_order_of_their_tokens(
    tokens: int, experts: int, count: int, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_experts, "_PAIRS", 32)
    torch.manual_seed(tokens)
    chosen = chosen_of(tokens, experts, count)
    x = torch.randn(tokens, hidden + 8)[:, :hidden]
    groups = ExpertGroups.empty(x, chosen, experts)
    for launch in group_launches(x, chosen, groups):
        launch.run()
    ids, order = chosen.flatten().sort(stable=True)
    assert torch.equal(groups.rows, x[order // count])
    assert torch.equal(groups.places.flatten()[order], torch.arange(tokens * count).int())
    assert torch.equal(groups.ends, torch.bincount(ids, minlength=experts).cumsum(0).int())


@pytest.mark.parametrize(
    ("dtype", "activation"), [(torch.float32, Activation.SILU), (torch.bfloat16, Activation.GELU)]
)
def test_the_weighted_sums_are_those_of_plain_torch(dtype: torch.dtype, activation: Activation) -> None:
    torch.manual_seed(3)
    x, chosen, shares = torch.randn(11, 32).to(dtype), chosen_of(11, 6, 3), torch.rand(11, 3)
    experts = weights(6, 32, dtype, activation)
    ours, theirs = (f(x, shares, chosen, experts) for f in (sum_experts, stacked_experts.sum_experts))
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_token_has_the_bits_that_it_has_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With grouped products whose rows do not depend on each other."""

    def row_by_row(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        numbers = torch.searchsorted(ends, torch.arange(len(rows)), right=True)
        return torch.stack([weights[i] @ row for i, row in zip(numbers.tolist(), rows, strict=True)])

    monkeypatch.setattr(cuda_experts, "grouped_product", row_by_row)
    torch.manual_seed(4)
    x, chosen, shares = torch.randn(13, 16), chosen_of(13, 5, 3), torch.rand(13, 3)
    x[2] = torch.nan
    experts = weights(5, 16, torch.float32, Activation.SILU)
    together = sum_experts(x, shares, chosen, experts)
    assert together[2].isnan().all()
    for token in (0, 1, 12):
        alone = slice(token, token + 1)
        assert torch.equal(sum_experts(x[alone], shares[alone], chosen[alone], experts), together[alone])


@pytest.mark.parametrize(
    ("dtype", "activation"), [(torch.bfloat16, Activation.SILU), (torch.float16, Activation.GELU)]
)
def test_few_tokens_have_the_sums_of_plain_torch_and_the_bits_that_they_have_alone(
    dtype: torch.dtype, activation: Activation
) -> None:
    torch.manual_seed(5)
    hidden = 136  # more than one tile of inputs, and more outputs than blocks of them have
    x, shares = torch.randn(MAX_ROWS, hidden).to(dtype), torch.rand(MAX_ROWS, 2)
    chosen = chosen_of(MAX_ROWS, 3, 2)
    experts = weights(3, hidden, dtype, activation)
    together = sum_experts(x, shares, chosen, experts)
    theirs = stacked_experts.sum_experts(x, shares, chosen, experts)
    torch.testing.assert_close(together, theirs, atol=0.03, rtol=0.03)
    x[1] = torch.nan
    for token in (0, MAX_ROWS - 1):
        alone = slice(token, token + 1)
        assert torch.equal(sum_experts(x[alone], shares[alone], chosen[alone], experts), together[alone])
    beside = sum_experts(x, shares, chosen, experts)
    assert beside[1].isnan().all()
    assert torch.equal(beside[2:], together[2:])
