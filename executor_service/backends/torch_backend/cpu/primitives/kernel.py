"""`Kernel`: a kind of call that threads compute together, in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

from numba import njit

from executor_service.backends.torch_backend.cpu.primitives.records import Kind

_ROWS_PER_CHUNK = 4  # fewer take less time than sharing them with a second thread


class Kernel(NamedTuple):
    """Compiled functions for the calls that one declaration describes; they get a record's address."""

    declaration: Kind
    count_chunks: Callable[[int], int]
    """(record) to how many chunks there are. They are independent of each other."""
    compute_chunk: Callable[[int, int], None]
    """(record, chunk): compute one of them."""


def _count_row_chunks(rows: int) -> int:
    return (rows + _ROWS_PER_CHUNK - 1) // _ROWS_PER_CHUNK


def _rows_of_chunk(rows: int, chunk: int) -> range:
    return range(chunk * _ROWS_PER_CHUNK, min((chunk + 1) * _ROWS_PER_CHUNK, rows))


count_row_chunks = cast(Callable[[int], int], njit(nogil=True)(_count_row_chunks))
"""How many chunks a number of rows is cut into, by kernels that go row by row."""
rows_of_chunk = cast(Callable[[int, int], range], njit(nogil=True)(_rows_of_chunk))
"""(rows, chunk): the rows of one of them."""
