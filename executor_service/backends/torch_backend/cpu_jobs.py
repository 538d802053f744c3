"""Jobs that several threads work off together, and nobody waits for a thread that is not there.

OpenMP's parallel regions end in a barrier: when another process holds a core, every one of a step's 150
regions waits for a thread that got no core and has nothing left to do; steps then last twenty times as
long. Here a job is a number of chunks, threads claim them from a counter, and the caller, who claims too,
waits only for chunks that a helper has begun.

State, int64: [TICKET] job number << 32 | next chunk; [FINISHED] chunks of this job that are done; [OVER] 1
between steps; from SLOTS on, a ring of slots (job number, kind, chunks, arguments...). A helper reads a slot
after its claim; a valid claim keeps its job, and so its slot, in place, and the number tells the others.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.atomic import fetch_add, load, store, yield_core
from executor_service.backends.torch_backend.cpu_attention import attend_chunk
from executor_service.backends.torch_backend.cpu_int8 import (
    int8_product_chunk,
    quantize_chunk,
    quantizing_chunks,
)
from executor_service.backends.torch_backend.cpu_linear import gated_chunk, multiply_chunk
from executor_service.backends.torch_backend.cpu_sampler import argmax_chunk, draw_chunk

HELP, MULTIPLY, GATED, ATTEND, DRAW, ARGMAX, INT8_PRODUCT, _QUANTIZE = range(8)

TICKET, FINISHED, OVER = 0, 16, 32  # far enough apart to lie on cache lines of their own
SLOTS, SLOT, RING = 48, 32, 64
STATE = SLOTS + SLOT * RING
MAX_ARGUMENTS = SLOT - 3
_PATIENCE = 2000  # turns of spinning before a core is offered to others
_LOW, _JOBS = (1 << 32) - 1, (1 << 31) - 1


@njit(nogil=True)
def _run_chunk(kind: int, arguments: int, chunk: int) -> None:
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
    elif kind == INT8_PRODUCT:
        int8_product_chunk(arguments, chunk)
    else:
        quantize_chunk(arguments, chunk)


@njit(nogil=True)
def _claim_and_run(state: int) -> bool:
    """Claim a chunk of the current job and do it; False where none was left."""
    ticket = fetch_add(state + 8 * TICKET, 1)
    job, chunk = ticket >> 32, ticket & _LOW
    slot = state + 8 * (SLOTS + SLOT * (job % RING))
    if chunk >= load(slot + 16) or load(slot) != job:
        return False
    _run_chunk(load(slot + 8), slot + 24, chunk)
    fetch_add(state + 8 * FINISHED, 1)
    return True


@njit(nogil=True)
def _execute(state: int, kind: int, chunks: int, arguments: NDArray[np.int64]) -> None:
    job = ((load(state + 8 * TICKET) >> 32) + 1) & _JOBS
    slot = state + 8 * (SLOTS + SLOT * (job % RING))
    store(slot, -1)  # before the rest changes: a late helper must not take it for the old job's
    store(slot + 8, kind)
    store(slot + 16, chunks)
    for i in range(arguments.shape[0]):
        store(slot + 24 + 8 * i, arguments[i])
    store(slot, job)
    store(state + 8 * FINISHED, 0)
    store(state + 8 * TICKET, job << 32)
    while _claim_and_run(state):
        pass
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
        if load(slot) == ticket >> 32 and ticket & _LOW < load(slot + 16) and _claim_and_run(state):
            turns = 0
        else:
            turns += 1
            if turns > _PATIENCE:
                yield_core()


@njit(nogil=True, cache=True)
def work(state: int, kind: int, chunks: int, arguments: NDArray[np.int64]) -> None:
    """Do a job of `chunks` chunks together with whoever helps; int64 arguments as its kind reads them.

    With kind HELP: help with others' jobs until the step is over. An int8 product has its rows quantized
    first. One function, since it holds all kernels and is compiled as a whole.
    """
    if kind == HELP:
        _help(state)
        return
    phase = _QUANTIZE if kind == INT8_PRODUCT else kind
    while True:  # one call in a loop: two would have all kernels compiled twice
        parts = quantizing_chunks(arguments.ctypes.data) if phase == _QUANTIZE else chunks
        _execute(state, phase, parts, arguments)
        if phase == kind:
            return
        phase = kind
