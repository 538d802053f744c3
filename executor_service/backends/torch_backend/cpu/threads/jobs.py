"""Jobs that several threads work off together, and nobody waits for a thread that is not there.

OpenMP's parallel regions end in a barrier: when another process holds a core, every one of a step's 150
regions waits for a thread that got no core and has nothing left to do; steps then last twenty times as
long. Here a job is a number of chunks, threads claim them from a counter, and the caller, who claims too,
waits only for chunks that a helper has begun. Jobs come as a table, so that many of them cost one call:
between two calls Python takes longer than a small job does, and has to ask for the interpreter first.

A job is a row of a table, int64 [KIND, CHUNKS, ROWS, the kind's other arguments...].

State, int64: [TICKET] job number << 32 | next chunk; [FINISHED] chunks of this job that are done; [OVER] 1
between steps; from SLOTS on, a ring of slots (job number, chunks, the job's address). A helper reads a slot
after its claim; a valid claim keeps its job, and so its slot, in place, and the number tells the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.attention.attend import attend_chunk
from executor_service.backends.torch_backend.cpu.attention.rotate import rotate_chunk
from executor_service.backends.torch_backend.cpu.gemm.bias import bias_chunk
from executor_service.backends.torch_backend.cpu.gemm.products import (
    gated_chunk,
    gated_int8_chunk,
    multiply_chunk,
    multiply_int8_chunk,
)
from executor_service.backends.torch_backend.cpu.gemm.quantize import quantize_chunk
from executor_service.backends.torch_backend.cpu.primitives.chunks import ROWS_AT_ONCE
from executor_service.backends.torch_backend.cpu.primitives.memory import fetch_add, load, store, yield_core
from executor_service.backends.torch_backend.cpu.rowwise.norm import norm_chunk
from executor_service.backends.torch_backend.cpu.rowwise.sampling import argmax_chunk, draw_chunk

MULTIPLY, GATED, MULTIPLY_INT8, GATED_INT8, ATTEND, DRAW, ARGMAX, QUANTIZE, NORM, ROTATE, BIAS = range(11)
BY_ROWS = (QUANTIZE, NORM, ROTATE, BIAS)
"""The kinds whose chunks are ROWS_AT_ONCE rows each."""

KIND, CHUNKS, ROWS, BATCH, K_CACHE, V_CACHE, VALUE_BYTES, PAGE_SIZE = range(8)
"""Columns of a job; those from BATCH on are of ATTEND and ROTATE."""
WIDTH = 24

TICKET, FINISHED, OVER = 0, 16, 32  # far enough apart to lie on cache lines of their own
SLOTS, SLOT, RING = 48, 8, 64
STATE = SLOTS + SLOT * RING
_PATIENCE = 2000  # turns of spinning before a core is offered to others
_LOW, _JOBS = (1 << 32) - 1, (1 << 31) - 1

Job = tuple[int, ...]


def table(jobs: Sequence[Job]) -> NDArray[np.int64]:
    """Jobs as `work` reads them, [jobs, WIDTH]."""
    made = np.zeros((len(jobs), WIDTH), np.int64)
    for row, job in zip(made, jobs, strict=True):
        row[: len(job)] = job
    return made


def by_rows(kind: int, rows: int, *arguments: int) -> Job:
    """A job of one of the kinds BY_ROWS."""
    return kind, -(-rows // ROWS_AT_ONCE), rows, *arguments


@njit(nogil=True)
def _run_chunk(job: int, chunk: int) -> None:
    kind, arguments = load(job), job + 16
    if kind == MULTIPLY:
        multiply_chunk(arguments, chunk)
    elif kind == GATED:
        gated_chunk(arguments, chunk)
    elif kind == ATTEND:
        attend_chunk(arguments, chunk)
    elif kind == DRAW:
        draw_chunk(arguments, chunk)
    elif kind == ARGMAX:
        argmax_chunk(arguments, chunk)
    elif kind == MULTIPLY_INT8:
        multiply_int8_chunk(arguments, chunk)
    elif kind == GATED_INT8:
        gated_int8_chunk(arguments, chunk)
    elif kind == QUANTIZE:
        quantize_chunk(arguments, chunk)
    elif kind == NORM:
        norm_chunk(arguments, chunk)
    elif kind == ROTATE:
        rotate_chunk(arguments, chunk)
    else:
        bias_chunk(arguments, chunk)


@njit(nogil=True)
def _claim_and_run(state: int, alone: int) -> bool:
    """Claim a chunk of the current job and do it; False where none was left. With `alone`: do that job."""
    job, chunk = alone, 0
    if alone == 0:
        ticket = fetch_add(state + 8 * TICKET, 1)
        number, chunk = ticket >> 32, ticket & _LOW
        slot = state + 8 * (SLOTS + SLOT * (number % RING))
        if chunk >= load(slot + 8) or load(slot) != number:
            return False
        job = load(slot + 16)
    _run_chunk(job, chunk)
    if alone == 0:
        fetch_add(state + 8 * FINISHED, 1)
    return True


@njit(nogil=True)
def _execute(state: int, job: int) -> None:
    chunks, alone = load(job + 8 * CHUNKS), 0
    if chunks == 1:  # done before anybody has come to help
        alone = job
    else:
        number = ((load(state + 8 * TICKET) >> 32) + 1) & _JOBS
        slot = state + 8 * (SLOTS + SLOT * (number % RING))
        store(slot, -1)  # before the rest changes: a late helper must not take it for the old job's
        store(slot + 8, chunks)
        store(slot + 16, job)
        store(slot, number)
        store(state + 8 * FINISHED, 0)
        store(state + 8 * TICKET, number << 32)
    while _claim_and_run(state, alone):
        if alone != 0:
            return
    turns = 0
    while load(state + 8 * FINISHED) < chunks:
        turns += 1
        if turns > _PATIENCE:
            yield_core()


@njit(nogil=True)
def _help(state: int) -> None:
    turns = 0
    while load(state + 8 * OVER) == 0:
        ticket = load(state + 8 * TICKET)
        slot = state + 8 * (SLOTS + SLOT * ((ticket >> 32) % RING))
        # Looked at before claiming, so that the counter does not run away while there is nothing to do.
        if load(slot) == ticket >> 32 and ticket & _LOW < load(slot + 8) and _claim_and_run(state, 0):
            turns = 0
        else:
            turns += 1
            if turns > _PATIENCE:
                yield_core()


@njit(nogil=True, cache=True)
def work(state: int, jobs: NDArray[np.int64]) -> None:
    """Do jobs [jobs, WIDTH] one after the other, each together with whoever helps.

    Without any: help with others' jobs until the step is over. One function, since it holds all kernels and
    is compiled as a whole.
    """
    if jobs.shape[0] == 0:
        _help(state)
    for i in range(jobs.shape[0]):
        _execute(state, jobs.ctypes.data + 8 * WIDTH * i)
