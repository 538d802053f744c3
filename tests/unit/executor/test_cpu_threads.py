"""CPU kernels in several threads: what one of them raises, whichever computes it, the caller raises."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest

from executor_service.backends.torch_backend.cpu.primitives.records import address_of
from executor_service.backends.torch_backend.cpu.rowwise.sampling import DrawTokens
from executor_service.backends.torch_backend.cpu.threads.thread_pool import ThreadPool

ROWS, VOCABULARY = 16, 64
CALLS = 400
LIMIT_S = 120.0  # only reached by a caller that waits for ever


class Draw:
    """A greedy choice between the same logits in each row. A temperature of 0 makes a row's chunk raise."""

    def __init__(self) -> None:
        self.logits = np.tile(np.linspace(0.0, 100.0, VOCABULARY, dtype=np.float32), (ROWS, 1))
        self.temperatures = np.full(ROWS, 0.01, np.float32)
        self.keys, self.top_k = np.arange(ROWS, dtype=np.uint64), np.full(ROWS, VOCABULARY, np.int64)
        self.top_p, self.min_p, self.totals = np.ones(ROWS), np.zeros(ROWS), np.zeros(ROWS)
        self.tokens = np.zeros(ROWS, np.int64)

    def call(self, rows: int = ROWS) -> DrawTokens:
        arrays = (self.logits, self.temperatures, self.keys, self.top_k, self.top_p, self.min_p, self.totals)
        return DrawTokens(rows, VOCABULARY, *(address_of(array) for array in (*arrays, self.tokens)))


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    pool = ThreadPool(2)
    yield pool
    pool.close()


def test_what_a_kernel_raises_in_any_thread_is_raised_by_the_caller_and_the_threads_go_on(
    pool: ThreadPool,
) -> None:
    raised, right = [], []

    def caller() -> None:
        with pool.step():
            for i in range(CALLS):
                draw = Draw()
                draw.temperatures[i % ROWS] = 0.0  # of the row that the helper claims, in some of these calls
                try:
                    pool.run(draw.call())
                except ZeroDivisionError:
                    raised.append(i)
                others = np.delete(draw.tokens, i % ROWS)
                good = Draw()
                pool.run(good.call())
                right.append(np.array_equal(others, np.delete(good.tokens, i % ROWS)) and good.tokens.all())

    thread = threading.Thread(target=caller, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "the caller waits for a chunk whose kernel raised"
    assert raised == list(range(CALLS))
    assert all(right)
    assert len(right) == CALLS


@pytest.mark.parametrize("helped", [False, True])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_no_call_behind_one_that_raised_is_made(pool: ThreadPool, rows: int, helped: bool) -> None:
    bad, behind = Draw(), Draw()
    bad.temperatures[0] = 0.0
    with pool.step() if helped else nullcontext(), pytest.raises(ZeroDivisionError):
        pool.run(bad.call(rows), behind.call(rows))
    assert not behind.tokens.any()
