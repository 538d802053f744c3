"""The experts of a mixture with stacked weights, computed in two grouped matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from executor_service.backends.torch_backend.files.architecture.activation import Activation, sigmoid


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Gated MLPs: down(activation(gate x) * up x), in one dtype."""

    gate_up: torch.Tensor  # [experts, 2 inner, hidden]: gate, then up
    down: torch.Tensor  # [experts, hidden, inner]
    activation: Activation


class SumExperts(Protocol):
    """A way to compute experts."""

    def __call__(
        self, x: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor, experts: StackedExperts
    ) -> torch.Tensor:
        """As `experts.Experts`."""


def sum_experts(
    x: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor, experts: StackedExperts
) -> torch.Tensor:
    """`SumExperts` in plain torch: tokens sorted by expert, then `grouped_product` twice."""
    ids, places = chosen.flatten().sort(stable=True)
    numbers = torch.arange(len(experts.down), device=x.device)
    ends = torch.searchsorted(ids, numbers, right=True, out_int32=True)
    both = grouped_product(x[places // chosen.shape[1]], experts.gate_up, ends)
    out = x.new_empty(len(places), x.shape[1])
    out[places] = grouped_product(experts.activation.join(both), experts.down, ends)
    weighted = out.view(*chosen.shape, -1).float() * shares[..., None]
    return weighted.sum(1).to(x.dtype)


def grouped_product(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each row times its expert's weight, [rows, n].

    rows [rows, k], sorted by expert; weights [experts, n, k]; ends int32 [experts]: of each expert's rows.
    """
    return functional.grouped_mm(rows, weights.transpose(-2, -1), offs=ends)


def route(logits: torch.Tensor, count: int, *, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest experts of each token, by a softmax of the router's logits [tokens, experts].

    Shares fp32 and experts int64 [tokens, count], in the order of the experts' numbers. With `renormalize` a
    token's shares sum to 1.
    """
    shares, chosen = torch.softmax(logits.float(), dim=-1).topk(count)
    if renormalize:
        shares = shares / shares.sum(-1, keepdim=True)
    chosen, order = chosen.sort(-1)
    return shares.gather(-1, order), chosen


def route_corrected(
    logits: torch.Tensor, correction: torch.Tensor, count: int, *, renormalize: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `route`, by a sigmoid: experts are chosen by it and a correction, fp32 [experts], and shares are it.

    Shares are multiplied by `scale` in the end. Source: DeepSeek-V3 (2024), without groups of experts.
    """
    sigmoids = sigmoid(logits.float())
    chosen = (sigmoids + correction).topk(count).indices.sort(-1).values
    shares = sigmoids.gather(-1, chosen)
    if renormalize:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    return shares * scale, chosen
