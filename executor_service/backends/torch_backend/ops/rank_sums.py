"""The sum of what several ranks have of the same numbers, in plain torch."""

from __future__ import annotations

import torch


def sum_in_order(parts: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
    """As `Kernels.sum_parts`."""
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    rounded = total.to(parts.dtype)
    return rounded if add_to is None else add_to.add_(rounded)
