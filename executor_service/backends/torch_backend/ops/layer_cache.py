"""`LayerCache`: the pages of one layer's keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


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
