"""Numbers of 4 or 8 bits that are packed into words of 32."""

from __future__ import annotations

import torch

WORD_BITS = 32
PACKED_BITS = (4, 8)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., words] to uint8 [..., words * 32 / bits], the lowest bits of a word first."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def difference_dtype(bits: int) -> torch.dtype:
    """The narrowest dtype for the difference of a number and a zero point, both unsigned."""
    return torch.int8 if bits < 8 else torch.int16
