"""The formats of keys and values in pages: the model's own dtype, or 8 bits with scales.

In 8 bits a vector, the key or the value of one token and KV head, has a scale of its own: its largest
magnitude, divided by the largest number of the format, rounded up to bf16. So a vector's numbers depend on
the vector alone, neither on the other tokens of its page nor on the chunk that it came with. A vector with a
NaN or infinity has the scale NaN, which makes every score and every sum that it enters NaN.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The formats with scales, and their largest numbers."""
SCALE_DTYPE = torch.bfloat16
LEAST = 1e-30
"""The least magnitude that a scale is made of, so that no scale is 0 or subnormal."""
_BELOW_SCALE = 0xFFFF  # bits that an fp32 has below those of a bf16

Places = tuple[torch.Tensor, torch.Tensor]
"""The pages and the slots of a step's tokens."""


def scale_count(dtype: torch.dtype) -> int:
    """Scales of one token and KV head: of its key and of its value, or none."""
    return 2 if dtype in LARGEST else 0


def token_bytes(kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one token takes in a layer's pages."""
    return kv_heads * (2 * head_dim * dtype.itemsize + scale_count(dtype) * SCALE_DTYPE.itemsize)


def rounded(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The vectors x [..., size] in an 8-bit dtype, and their scales, bf16 [...]."""
    wide = x.float()
    largest = wide.abs().amax(-1).clamp_min(LEAST)
    bits = (largest / LARGEST[dtype]).view(torch.int32)
    scales = torch.bitwise_and(bits + _BELOW_SCALE, ~_BELOW_SCALE).view(torch.float32)
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    numbers = torch.nan_to_num(wide / scales[..., None])
    return (numbers if dtype.is_floating_point else numbers.round()).to(dtype), scales.to(SCALE_DTYPE)


def page_storage(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros [shape]. On CPU the system provides memory when it is first written, 4 KiB at a time.

    So a pool of pages is a bound, not a reservation: only pages that were used are resident.
    """
    bytes_ = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not bytes_:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, bytes_)  # unmapped when the last tensor over it is gone
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def plain_cache(
    pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """Pages of zeros: K and V [pages, page_size, kv_heads, head_dim], scales [pages, page_size, kv_heads, 2].

    In the last dimension of the scales is that of K, then that of V.
    """
    slots = pages, page_size, kv_heads
    return LayerCache(
        page_storage(*slots, head_dim, dtype=dtype, device=device),
        page_storage(*slots, head_dim, dtype=dtype, device=device),
        page_storage(*slots, scale_count(dtype), dtype=SCALE_DTYPE, device=device),
    )


def scale_words(cache: LayerCache) -> torch.Tensor:
    """The scales of a `plain_cache` as flat int32, one for each slot and KV head: V's bits above K's."""
    return cache.scales.flatten().view(torch.int32)


def put(cache: LayerCache, places: Places, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write k and v [tokens, kv_heads, head_dim] to their places in a `plain_cache`."""
    if cache.scales.numel():
        (k, k_scales), (v, v_scales) = rounded(k, cache.k.dtype), rounded(v, cache.v.dtype)
        cache.scales[places] = torch.stack([k_scales, v_scales], -1)
    cache.k[places], cache.v[places] = k, v


def get(cache: LayerCache, table: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V in the pages of a block table, each [table * page_size, kv_heads, head_dim] in `dtype`."""
    k, v = cache.k[table].flatten(0, 1), cache.v[table].flatten(0, 1)
    if cache.scales.numel():
        scales = cache.scales[table].flatten(0, 1).float()
        k, v = k.float() * scales[..., :1], v.float() * scales[..., 1:]
    return k.to(dtype), v.to(dtype)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """K and V of one layer; the first dimension is the page; each `Kernels` chooses the other dimensions."""

    k: torch.Tensor
    v: torch.Tensor
    scales: torch.Tensor  # of both, where they have 8 bits (see `page_format`); else without elements

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.k.nbytes + self.v.nbytes + self.scales.nbytes


def copy_keys_and_values(caches: Sequence[LayerCache], source: int, target: int) -> None:
    """Copy a page in every layer."""
    for cache in caches:
        for pages in (cache.k, cache.v, cache.scales):
            pages[target] = pages[source]
