"""`route` in Triton: one launch, not eight as in plain torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel
from executor_service.backends.torch_backend.cuda.launch.launch import Launch, power_of_two

# Below all probabilities, in the order in which experts are chosen. None that is absent ever is.
_NAN, _CHOSEN, _ABSENT = tl.constexpr(-1.0), tl.constexpr(-2.0), tl.constexpr(-3.0)


@triton.jit
def _route_kernel(
    logits, shares, chosen, stride,
    experts: tl.constexpr, columns: tl.constexpr, count: tl.constexpr, renormalize: tl.constexpr,
):  # fmt: skip
    """Program (token): its experts, one after the other; of equally likely ones the first.

    It chooses `count` experts even where a logit is NaN: their numbers are used as places in memory.
    """
    begin_kernel()
    token, expert = tl.program_id(0).to(tl.int64), tl.arange(0, columns)
    real = expert < experts
    scores = tl.load(logits + token * stride + expert, mask=real, other=float("-inf")).to(tl.float32)
    weights = tl.exp(scores - tl.max(scores, 0))
    probabilities = tl.div_rn(weights, tl.sum(weights, 0))
    left = tl.where(probabilities == probabilities, probabilities, _NAN)
    left = tl.where(real, left, _ABSENT)
    total = 0.0
    for _ in tl.static_range(count):
        highest = tl.max(left, 0)
        first = tl.min(tl.where(left == highest, expert, columns), 0)
        total += tl.sum(tl.where(expert == first, probabilities, 0.0), 0)
        left = tl.where(expert == first, _CHOSEN, left)
    is_chosen = left == _CHOSEN
    place = token * count + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    if renormalize:
        probabilities = tl.div_rn(probabilities, total)
    tl.store(shares + place, probabilities, mask=is_chosen)
    tl.store(chosen + place, expert.to(tl.int64), mask=is_chosen)


def route(logits: torch.Tensor, count: int, *, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As `stacked_experts.route`; logits have contiguous columns."""
    tokens = len(logits)
    shares = torch.empty(tokens, count, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, count, dtype=torch.int64, device=logits.device)
    route_launch(logits, shares, chosen, renormalize=renormalize).run()
    return shares, chosen


def route_launch(
    logits: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor, *, renormalize: bool
) -> Launch:
    """The launch of `route`."""
    tokens, experts = logits.shape
    return Launch(
        _route_kernel,
        (tokens, 1, 1),
        {"logits": logits, "shares": shares, "chosen": chosen, "stride": logits.stride(0)},
        {
            "experts": experts, "columns": power_of_two(experts), "count": shares.shape[1],
            "renormalize": int(renormalize),
        },
        warps=1,
        stages=1,
    )  # fmt: skip
