"""Drawing one token a row from filtered, noisy logits, in plain torch.

Top-k, top-p and min-p each keep a prefix of the tokens in order of likelihood (then of id), which makes
drawing exact without sorting: take the noisiest token; if fewer than k tokens, and less mass than the
nucleus holds, come before it, it is kept, and so it is the noisiest of the kept. If not, nothing after it is
kept either: take the noisiest token before it, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from executor_service.backends.torch_backend.gumbel import gumbel


@dataclass(frozen=True, slots=True)
class Filters:
    """Top-k, top-p and min-p of some rows, [rows] each.

    `top_k` is the vocabulary's size where it is off; `totals` is the mass that top-k leaves, as
    exp(z - highest), where top-p applies to it, and 0 where top-p applies to everything.
    """

    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    totals: NDArray[np.float64]


def draw(
    logits: torch.Tensor, temperatures: NDArray[np.float32], keys: NDArray[np.uint64], filters: Filters
) -> torch.Tensor:
    """One token for each row of logits fp32 [rows, vocabulary], int64 [rows]; any device.

    `temperatures` > 0 and the noise `keys`: [rows].
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
