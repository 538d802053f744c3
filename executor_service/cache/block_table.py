"""The list of one sequence's pages. `KvCache` decides which pages are in it, and counts who shares them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class BlockTable:
    """The pages of one sequence in order, and the hashes of its full pages as far as `publish` has come."""

    __slots__ = ("_buffer", "_view", "count", "hashes", "private_end", "root")

    def __init__(self, root: bytes) -> None:
        self.root = root
        self.hashes: list[bytes] = []  # hashes[i] covers the tokens of pages 0..i
        self.count = 0
        # Positions of the sequence's new tokens below this one are in pages that nothing else reads.
        self.private_end = 0
        self._buffer: NDArray[np.int32] = np.zeros(8, np.int32)
        self._view = self._buffer[:0]  # the last result of `pages`; stale if its length is not `count`

    def pages(self) -> NDArray[np.int32]:
        """Page numbers, int32, shape [count]. A view, valid until the table changes."""
        if len(self._view) != self.count:
            self._view = self._buffer[: self.count]
        return self._view

    def append(self, page: int) -> None:
        """Add a page at the end. The caller has counted the reference to it."""
        if self.count == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.zeros_like(self._buffer)])
            self._view = self._buffer[:0]
        self._buffer[self.count] = page
        self.count += 1

    def replace(self, index: int, page: int) -> None:
        """Replace the page at `index`."""
        self._buffer[index] = page

    def at(self, index: int) -> int:
        """The page at `index`."""
        return self._buffer.item(index)
