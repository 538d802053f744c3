"""The log of the sum of exponentials of each row: what turns logits into logprobs.

torch's own divides a single row among its threads and several rows not: its last bit depends on the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.primitives.kernel import Kernel
from executor_service.backends.torch_backend.cpu.primitives.memory import floats
from executor_service.backends.torch_backend.cpu.primitives.records import Address, reader
from executor_service.backends.torch_backend.cpu.primitives.vector_math import largest
from executor_service.backends.torch_backend.cpu.rowwise.sampling import exponential_sum


class LogSumRows(NamedTuple):
    """Log of the sum of exponentials of each row. A chunk is a row."""

    rows: int
    vocabulary: int
    logits: Address  # fp32 [rows, vocabulary]
    sums: Address  # fp32 [rows]: the result


_read = reader(LogSumRows)


@njit(nogil=True, fastmath={"contract"})
def _log_sum(logits: NDArray[np.float32]) -> np.float32:
    top = largest(logits)
    return np.float32(np.float64(top) + np.log(exponential_sum(logits, top)))


@njit(nogil=True)
def _count_chunks(record: int) -> int:
    return _read(record).rows


@njit(nogil=True)
def _compute_chunk(record: int, row: int) -> None:
    call = _read(record)
    logits = floats(call.logits + 4 * row * call.vocabulary, call.vocabulary)
    floats(call.sums, call.rows)[row] = _log_sum(logits)


LOG_SUM_ROWS = Kernel(LogSumRows, _count_chunks, _compute_chunk)
