"""Masks: which tokens a position may sample, one bit for each token id.

Token t is allowed if bit t % 8 of byte t // 8 is set. A mask has 4 * ceil(vocabulary / 32) bytes, as the
int32 words that automata of others write; the bits beyond the vocabulary are 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Masks = NDArray[np.uint8]
"""uint8 [positions, `mask_bytes`]; one mask: [`mask_bytes`]."""


def mask_bytes(vocab_size: int) -> int:
    """Bytes of one mask."""
    return 4 * -(-vocab_size // 32)


def read_masks(packed: bytes, positions: int, vocab_size: int) -> Masks:
    """A copy of `positions` packed masks, without the bits beyond the vocabulary."""
    masks = np.frombuffer(packed, np.uint8).reshape(positions, mask_bytes(vocab_size)).copy()
    whole, rest = divmod(vocab_size, 8)
    if rest:
        masks[:, whole] &= (1 << rest) - 1
        whole += 1
    masks[:, whole:] = 0
    return masks


def allowed_tokens(masks: Masks, vocab_size: int) -> NDArray[np.bool_]:
    """The masks as booleans, [..., vocabulary]."""
    return np.unpackbits(masks, axis=-1, count=vocab_size, bitorder="little").view(np.bool_)
