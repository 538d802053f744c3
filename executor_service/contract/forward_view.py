"""`ForwardView`: how an input of the RPC Forward is computed, and which of its tokens come back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ForwardView:
    """Of one input of q tokens. Default: all of it, each token at its place and seeing all before it."""

    first: int = 0  # the first token whose hidden state and logits come back
    count: int = 0  # tokens that come back; 0: to the end
    positions: NDArray[np.int32] | None = None  # [q], for rotary embeddings; None: 0, 1, 2, ...
    # [q]: the tokens that are seen; or [q, q]: a row's token sees a column's.
    mask: NDArray[np.bool_] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it has neither positions nor a mask."""
        return self.positions is None and self.mask is None

    @property
    def returned(self) -> slice:
        """The tokens that come back."""
        return slice(self.first, self.first + self.count if self.count else None)

    def seen(self, begin: int, end: int, window: int = 0) -> NDArray[np.bool_]:
        """Which of the tokens 0 .. end - 1 the tokens begin .. end - 1 see, [end - begin, end].

        `window`: tokens that a token sees at most, itself among them; 0: all before it.
        """
        distance = np.arange(begin, end, dtype=np.int32)[:, None] - np.arange(end, dtype=np.int32)
        seen = (distance >= 0) & (distance < window) if window else distance >= 0
        if self.mask is not None:
            seen &= self.mask[:end] if self.mask.ndim == 1 else self.mask[begin:end, :end]
        return seen

    def blind(self, tokens: int, window: int = 0) -> int:
        """The first of `tokens` tokens that sees none, itself included; -1: each sees one."""
        for begin in range(0, tokens if self.mask is not None else 0, BLOCK):
            sees = self.seen(begin, min(begin + BLOCK, tokens), window).any(axis=1)
            if not sees.all():
                return begin + int(sees.argmin())
        return -1


BLOCK = 256
"""Tokens whose visibility is computed at once: of 8,192 tokens that is 2 MiB."""

WHOLE = ForwardView()
