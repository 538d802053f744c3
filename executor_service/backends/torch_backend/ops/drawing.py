"""Drawing one token per row from masked and filtered logits with noise, in plain torch.

Top-k, top-p and min-p each keep a prefix of the tokens in order of likelihood (then of id), so that drawing
is exact without sorting. Take the token that is largest with noise. It is kept if fewer than k tokens come
before it, if their mass is less than the nucleus's, and if it has at least min_p of the likeliest token's
probability; then it is the answer. Otherwise no token after it is kept either: take the largest with noise
among those before it, and repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from executor_service.contract.masks import Masks, allowed_tokens


@dataclass(frozen=True, slots=True)
class Filters:
    """Top-k, top-p and min-p of some rows, [rows] each."""

    top_k: NDArray[np.int64]  # the vocabulary's size: off
    top_p: NDArray[np.float64]  # 1: off
    min_p: NDArray[np.float64]  # 0: off
    totals: NDArray[
        np.float64
    ]  # with top_k: the mass of the tokens that it keeps, as exp(z - highest); else 0


def exclude(logits: torch.Tensor, places: NDArray[np.int64], masks: Masks) -> None:
    """Set logits[places] to -inf where the masks do not allow the token.

    logits fp32 [rows, vocabulary] on any device, overwritten; places [n], rows without repetition; masks [n].
    """
    excluded = torch.from_numpy(~allowed_tokens(masks, logits.shape[-1])).to(logits.device)
    rows = torch.from_numpy(places).to(logits.device)
    logits[rows] = logits[rows].masked_fill(excluded, -torch.inf)


def draw(
    logits: torch.Tensor, temperatures: NDArray[np.float32], keys: NDArray[np.uint64], filters: Filters
) -> torch.Tensor:
    """One token for each row of logits, int64 [rows].

    logits fp32 [rows, vocabulary] on any device; temperatures [rows], above 0; keys [rows], of the noise.
    """

    def column(values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(logits.device)[:, None]

    ids = torch.arange(logits.shape[-1], device=logits.device)[None, :]
    scaled = logits / column(temperatures)
    noisy = scaled + gumbel(column(keys.view(np.int64)), ids)
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp()
    top_k, top_p, min_p, totals = (
        column(values) for values in (filters.top_k, filters.top_p, filters.min_p, filters.totals)
    )
    totals = torch.where(totals > 0, totals, weights.sum(-1, keepdim=True, dtype=torch.float64))
    mass = torch.where(top_p < 1, top_p * totals, torch.inf)
    while True:
        chosen = noisy.argmax(-1, keepdim=True)
        border = scaled.gather(-1, chosen)
        before = (scaled > border) | ((scaled == border) & (ids < chosen))
        count = before.sum(-1, keepdim=True)
        held = (weights * before).sum(-1, keepdim=True, dtype=torch.float64)
        kept = (count < top_k) & (held < mass) & (weights.gather(-1, chosen) >= min_p) | (count == 0)
        if bool(kept.all()):
            return chosen[:, 0]
        noisy = torch.where(kept | before, noisy, -torch.inf)


_MASK = 0xFFFFFFFF


def hash_tokens(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The hash of each id under its row's key: int64 [n, m] with the value of a uint32.

    keys: int64 [n, 1], the bits of a uint64; ids: int64 [n, m] or [1, m]. Products of int64 wrap around, and
    only their low 32 bits are used, so the arithmetic is exact.
    """
    low, high = keys & _MASK, (keys >> 32) & _MASK
    x = ((ids * 0x9E3779B1) & _MASK) ^ low
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    x = ((x ^ (x >> 16)) + high) & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def gumbel(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise of `executor_service.contract.noise`, fp32 [n, m], as `hash_tokens` takes keys and ids."""
    w = hash_tokens(keys, ids).to(torch.float32) * 2.0**-32
    w = (w + 2.0**-33).clamp_(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-w))
