"""The normative sampling noise of `executor_service.contract.noise`, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

_SCALE, _HALF, _MAX = tl.constexpr(2.0**-32), tl.constexpr(2.0**-33), tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def gumbel_noise(low, high, token):
    """Gumbel noise, fp32, of token ids, int32, under one key whose halves are low and high, uint32."""
    x = (token.to(tl.uint32) * 0x9E3779B1) ^ low
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = (x ^ (x >> 16)) + high
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    w = tl.minimum(x.to(tl.float32) * _SCALE + _HALF, _MAX)
    # log1p(-w) as `executor_service.contract.noise` computes it.
    u = 1.0 - w
    lost = 1.0 - u
    tiny = lost == 0
    minus_log1p = -tl.log(u) * tl.div_rn(w, tl.where(tiny, 1.0, lost))
    return -tl.log(tl.where(tiny, w, minus_log1p))
