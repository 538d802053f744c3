"""`halves_first`: rows of queries and keys in the order in which they are rotated here.

Element i of a head is rotated with element i + n / 2, as in Llama of transformers, n being the number of
rotated elements. Files of some architectures have them at 2i and 2i + 1. Scores are the same in any order
that queries and keys have in common, so that it is enough to reorder the rows once.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers, Weight


def order_of_halves(rows: int, head_dim: int, rotary_dim: int) -> NDArray[np.int64]:
    """Which of `rows` rows, of whole heads stored as pairs, comes where; the last ones of a head stay."""
    order = np.arange(head_dim)
    order[:rotary_dim] = order[:rotary_dim].reshape(-1, 2).T.flatten()
    places: NDArray[np.int64] = (np.arange(rows // head_dim)[:, None] * head_dim + order).flatten()
    return places


def halves_first(weight: Weight, head_dim: int, rotary_dim: int) -> Weight:
    """Rows [heads * head_dim, ...] that were stored as pairs; the last ones of a head are not rotated."""
    rows = torch.from_numpy(order_of_halves(weight.shape[0], head_dim, rotary_dim))
    if isinstance(weight, ScaledNumbers):
        minima = None if weight.minima is None else weight.minima[rows]
        return ScaledNumbers(weight.numbers[rows], weight.scales[rows], weight.groups, minima)
    return weight[rows]
