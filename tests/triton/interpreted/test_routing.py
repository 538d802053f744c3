"""Routing in Triton, interpreted, chooses what plain torch does."""

from __future__ import annotations

import pytest
import torch

from executor_service.backends.torch_backend.cuda.linear.routing import route
from executor_service.backends.torch_backend.ops import stacked_experts

DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize(("tokens", "experts", "count"), [(1, 128, 8), (5, 60, 4), (3, 8, 2), (2, 4, 4)])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_and_shares_are_those_of_plain_torch(
    tokens: int, experts: int, count: int, dtype: torch.dtype, *, renormalize: bool
) -> None:
    torch.manual_seed(experts)
    logits = torch.stack([torch.randperm(experts) for _ in range(tokens)]).to(dtype) / 8  # all differ
    wide = torch.cat([logits, torch.full((tokens, 3), 99.0, dtype=dtype)], 1)[:, :experts]
    ours, theirs = (f(wide, count, renormalize=renormalize) for f in (route, stacked_experts.route))
    assert torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=0)


def test_of_equally_likely_experts_the_first_are_chosen() -> None:
    shares, chosen = route(torch.tensor([[1.0, 5.0, 1.0, 1.0, 5.0, 1.0]]), 4, renormalize=True)
    assert chosen.tolist() == [[0, 1, 2, 4]]
    assert shares.sum().item() == pytest.approx(1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_still_name_experts_that_exist(odd: float) -> None:
    logits = torch.zeros(4, 6)
    logits[1], logits[2, 3] = odd, odd
    shares, chosen = route(logits, 3, renormalize=True)
    for row in chosen.tolist():
        assert sorted(set(row)) == row
        assert set(row) <= set(range(6))
    assert not shares[1].isfinite().any()
    assert shares[[0, 3]].isfinite().all()
