"""`work`: calls that several threads compute together, without waiting for a thread that has no core.

OpenMP's parallel regions end in a barrier. When another process holds a core, each of a step's 150 regions
waits for a thread that has no core and no work left, and steps last twenty times as long. Here a call is a
number of chunks, which threads claim from a counter. The caller claims chunks too, and waits only for those
that a helper has begun. Calls come as a table, so that many of them cost Python one call: between two calls
Python takes longer than a small kernel, since it has to get the interpreter's lock first.

The threads share a state of int64 words. Its ticket is the number of the current call << 32 | the next chunk;
its ring has a `Slot` for each of the last calls. A helper reads the slot after its claim. A valid claim keeps
its call unfinished, and hence the slot and the table in place; the slot's number tells whether a claim is
valid.

A chunk whose kernel raises counts as finished. The thread that computed it leaves the error in the state, and
the caller raises it when no thread uses the call's memory any more. The calls after this one are not made.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.primitives.memory import fetch_add, load, store, yield_core
from executor_service.backends.torch_backend.cpu.primitives.records import (
    WORD_BYTES,
    Address,
    reader,
    words_of_field,
)
from executor_service.backends.torch_backend.cpu.primitives.self_contained import SelfContained
from executor_service.backends.torch_backend.cpu.threads.call_table import HEADER_SIZE, WIDTH
from executor_service.backends.torch_backend.cpu.threads.dispatch import (
    COUNT,
    RECORD_SIZES,
    Header,
    call_kernel,
    raise_error,
)


class Slot(NamedTuple):
    """A call in the ring. Each word is read and written atomically, by itself."""

    number: int
    chunks: int
    call: Address


# Bytes in the state, far enough apart to lie on cache lines of their own.
_TICKET = 0
_FINISHED = 128  # chunks of the current call that are done
_OVER = 256  # 1 between steps
_ERROR = 320  # what a chunk of the current call raised, of several the last; 0: nothing
_SLOTS = 384
_SLOT_BYTES = 64
_RING = 64

STATE_SIZE = (_SLOTS + _RING * _SLOT_BYTES) // WORD_BYTES
"""Words of the state."""
OVER = _OVER // WORD_BYTES
"""The word that is 1 between steps, and 0 while helpers are to look for chunks."""

_NUMBER, _CHUNKS, _CALL = (WORD_BYTES * words_of_field(Slot, name).start for name in Slot._fields)
_HEADER_BYTES = WORD_BYTES * HEADER_SIZE
_SIZES = np.array(RECORD_SIZES)

_PATIENCE = 2000  # turns of spinning before the core is offered to other threads
_LOW, _NUMBERS = (1 << 32) - 1, (1 << 31) - 1

_read_header = reader(Header)


@njit(nogil=True)
def _slot(state: int, number: int) -> int:
    return state + _SLOTS + _SLOT_BYTES * (number % _RING)


@njit(nogil=True)
def _compute(functions: int, call: int, chunk: int) -> int:
    """Compute a chunk, or count them with COUNT, by the machine function of the call's kind."""
    function = load(functions + WORD_BYTES * _read_header(call).kind)
    return call_kernel(function, call + _HEADER_BYTES, chunk)


@njit(nogil=True)
def _claim_and_compute(functions: int, state: int) -> bool:
    """Claim a chunk of the current call and compute it; False where none was left."""
    ticket = fetch_add(state + _TICKET, 1)
    number, chunk = ticket >> 32, ticket & _LOW
    slot = _slot(state, number)
    if chunk >= load(slot + _CHUNKS) or load(slot + _NUMBER) != number:
        return False
    error = _compute(functions, load(slot + _CALL), chunk)
    if error != 0:
        store(state + _ERROR, error)
    fetch_add(state + _FINISHED, 1)
    return True


@njit(nogil=True)
def _offer(state: int, call: int, chunks: int) -> None:
    """Make this the current call."""
    number = ((load(state + _TICKET) >> 32) + 1) & _NUMBERS
    slot = _slot(state, number)
    store(slot + _NUMBER, -1)  # before the rest changes: a late helper must not take it for the old call's
    store(slot + _CHUNKS, chunks)
    store(slot + _CALL, call)
    store(slot + _NUMBER, number)
    store(state + _FINISHED, 0)
    store(state + _ERROR, 0)
    store(state + _TICKET, number << 32)


@njit(nogil=True)
def _execute(functions: int, state: int, call: int) -> None:
    chunks = _compute(functions, call, COUNT)
    if chunks == 1:  # done before a helper has come
        raise_error(_compute(functions, call, 0))
        return
    _offer(state, call, chunks)
    while _claim_and_compute(functions, state):
        pass
    turns = 0
    while load(state + _FINISHED) < chunks:
        turns += 1
        if turns > _PATIENCE:
            yield_core()
    raise_error(load(state + _ERROR))


@njit(nogil=True)
def _help(functions: int, state: int) -> None:
    turns = 0
    while load(state + _OVER) == 0:
        ticket = load(state + _TICKET)
        slot = _slot(state, ticket >> 32)
        # Looked at before claiming, so that the counter does not run away while there is nothing to do.
        is_current = load(slot + _NUMBER) == ticket >> 32
        if is_current and ticket & _LOW < load(slot + _CHUNKS) and _claim_and_compute(functions, state):
            turns = 0
        else:
            turns += 1
            if turns > _PATIENCE:
                yield_core()


@njit(nogil=True)
def _check(functions: int, words: NDArray[np.int64]) -> None:
    """Raises ValueError for words that are no call table, with which kernels would read arbitrary memory."""
    if words.shape[1] != WIDTH:
        raise ValueError("calls are of another width than those of a table")
    for i in range(words.shape[0]):
        header = _read_header(words.ctypes.data + WORD_BYTES * WIDTH * i)
        if header.kind < 0 or header.kind >= len(_SIZES):
            raise ValueError("there is no kernel for a call's kind")
        if header.size != _SIZES[header.kind]:
            raise ValueError("a call's record is not of its kind's size")
        if load(functions + WORD_BYTES * header.kind) == 0:
            raise ValueError("the kernel for a call's kind is not compiled")


@njit(nogil=True, cache=True, pipeline_class=SelfContained)
def work(functions: int, state: int, words: NDArray[np.int64]) -> None:
    """Compute the calls of a `CallTable` one after the other, each together with the helpers.

    Without calls: help with the caller's until the step is over. `functions`: `dispatch.FUNCTIONS`. Raises
    ValueError for words that are no calls, before any of them is computed, and what a kernel raises.
    """
    _check(functions, words)
    if words.shape[0] == 0:
        _help(functions, state)
    for i in range(words.shape[0]):
        _execute(functions, state, words.ctypes.data + WORD_BYTES * WIDTH * i)
