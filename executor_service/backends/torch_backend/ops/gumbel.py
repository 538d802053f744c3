"""The normative sampling noise of `executor_service.contract.noise`, in torch on any device."""

from __future__ import annotations

import torch

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
    """Gumbel noise, fp32 [n, m], of the arguments of `hash_tokens`."""
    w = hash_tokens(keys, ids).to(torch.float32) * 2.0**-32
    w = (w + 2.0**-33).clamp_(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-w))
