"""The bytes of each token id: the only part of a tokenizer that the scheduler's own process has.

A tokenizer process computes them once (`worker.pieces`) and sends them as one block.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of all token ids, concatenated. Special tokens have none."""

    data: bytes
    lengths: array[int]  # number of bytes of each id, from id 0 on
    strip: int  # number of spaces to remove from the beginning of a text
    special: Mapping[int, str] = field(default_factory=dict)  # texts of the special tokens, by id


class Vocabulary(dict[int, bytes]):
    """Bytes by id, cut from the block at first use. Ids without a token (padding) have no bytes."""

    def __init__(self, pieces: TokenBytes) -> None:
        super().__init__()
        self._data = pieces.data
        self._ends = array("q", accumulate(pieces.lengths))
        self.strip = pieces.strip
        """Number of spaces to remove from the beginning of a text."""
        self.special = pieces.special
        """The special tokens' texts by id: no text has their bytes."""

    def __missing__(self, id_: int) -> bytes:
        piece = self[id_] = self._piece(id_)
        return piece

    def shown(self, id_: int) -> bytes:
        """The bytes that show a token alone: also those of a special token's text. They are not kept."""
        special = self.special.get(id_)
        return self._piece(id_) if special is None else special.encode()

    def _piece(self, id_: int) -> bytes:
        ends = self._ends
        return self._data[ends[id_ - 1] if id_ else 0 : ends[id_]] if 0 <= id_ < len(ends) else b""
