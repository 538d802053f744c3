"""The bytes that each token id stands for: all that the scheduler's process has of a tokenizer.

The tokenizer process works them out once (`worker.pieces`) and sends them as one block.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Each id's bytes, one after the other. Special tokens have none."""

    data: bytes
    lengths: array[int]  # bytes of each id from 0 on
    strip: int  # spaces to take from the beginning of a text


class Vocabulary(dict[int, bytes]):
    """Bytes by id, cut out when first asked for. Unknown ids, by which models pad, are empty."""

    def __init__(self, pieces: TokenBytes) -> None:
        super().__init__()
        self._data = pieces.data
        self._ends = array("q", accumulate(pieces.lengths))
        self.strip = pieces.strip
        """Spaces to take from the beginning of a text."""

    def __missing__(self, id_: int) -> bytes:
        ends = self._ends
        piece = self._data[ends[id_ - 1] if id_ else 0 : ends[id_]] if 0 <= id_ < len(ends) else b""
        self[id_] = piece
        return piece
