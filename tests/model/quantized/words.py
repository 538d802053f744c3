"""Packing of numbers into words of 32 bits, one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def packed_rows(numbers: NDArray[np.int64], bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """[rows, columns] to int32 [rows, words]; place i of a word has the number `order[i]` of its columns."""
    each = 32 // bits
    rows, columns = numbers.shape
    assert columns % each == 0
    assert numbers.min() >= 0
    assert numbers.max() < 2**bits
    words = np.zeros((rows, columns // each), np.uint32)
    for word in range(columns // each):
        for place in range(each):
            number = numbers[:, each * word + (order[place] if order else place)].astype(np.uint32)
            words[:, word] |= number << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def packed_columns(numbers: NDArray[np.int64], bits: int) -> torch.Tensor:
    """[rows, columns] to int32 [words, columns]."""
    return packed_rows(numbers.T, bits).T.contiguous()
