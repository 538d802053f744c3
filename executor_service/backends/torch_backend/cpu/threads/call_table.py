"""`CallTable`: calls in the order in which they are made, as `work` reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.primitives.records import (
    Record,
    size_of,
    words_of,
    words_of_field,
)
from executor_service.backends.torch_backend.cpu.threads.dispatch import RECORD_SIZES, Header, header_of

HEADER_SIZE = size_of(Header)
WIDTH = HEADER_SIZE + max(RECORD_SIZES)
"""Words of a call: as many as the longest record takes."""


class Field:
    """A field of several calls of a table."""

    def __init__(self, words: NDArray[np.int64], places: NDArray[np.intp]) -> None:
        """`places` [calls, words of the field] in all words of the table."""
        self._words, self._places = words, places
        self._last: Sequence[int] | None = None  # what `set` wrote into all calls

    def set(self, words: Sequence[int]) -> None:
        """Write the words of the field, the same into all calls."""
        if words != self._last:  # most steps have as many rows as the one before
            self._words[self._places] = self._last = words

    def set_each(self, words: NDArray[np.int64]) -> None:
        """Write the words [calls, words of the field] of each call."""
        self._words[self._places], self._last = words, None


class CallTable:
    """Records of the kinds in `dispatch.KERNELS`; one call after the other, each by all threads."""

    def __init__(self, calls: Sequence[Record]) -> None:
        self._kinds = [type(call) for call in calls]
        self.words = np.zeros((len(calls), WIDTH), np.int64)
        """[calls, WIDTH]: of each call a header, its record, and zeros."""
        for row, call in zip(self.words, calls, strict=True):
            words = [*header_of(type(call)), *words_of(call)]
            row[: len(words)] = words

    def field(self, name: str) -> Field:
        """The field of this name in all calls that have it."""
        places = [
            WIDTH * i + HEADER_SIZE + np.array(words_of_field(kind, name))
            for i, kind in enumerate(self._kinds)
            if name in kind._fields  # type: ignore[attr-defined]
        ]
        return Field(self.words.reshape(-1), np.array(places))
