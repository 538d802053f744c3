"""Which experts of a mixture compute a token, and the share of each in the sum."""

from __future__ import annotations

import torch


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
