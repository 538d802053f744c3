"""The bytes of each token id: the only part of a tokenizer that the scheduler's own process has.

A tokenizer process computes them once (`worker.pieces`) and sends them as one block.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of all token ids, concatenated. Special tokens have none."""

    data: bytes
    lengths: array[int]  # number of bytes of each id, from id 0 on
    strip: int  # number of spaces to remove from the beginning of a text


class Vocabulary(dict[int, bytes]):
    """Bytes by id, cut from the block at first use. Ids without a token (padding) have no bytes."""

    def __init__(self, pieces: TokenBytes) -> None:
        super().__init__()
        self._data = pieces.data
        self._ends = array("q", accumulate(pieces.lengths))
        self.strip = pieces.strip
        """Number of spaces to remove from the beginning of a text."""

    def __missing__(self, id_: int) -> bytes:
        ends = self._ends
        piece = self._data[ends[id_ - 1] if id_ else 0 : ends[id_]] if 0 <= id_ < len(ends) else b""
        self[id_] = piece
        return piece
