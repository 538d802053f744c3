"""Dynamic work sharing inside a numba parallel region.

Numba's own schedule is static: when another process takes a core for a moment, all threads wait for the
unlucky one. Here threads claim chunks from a counter until none is left.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_CHUNKS_PER_THREAD = 8


@intrinsic
def claim(_typing_context, counter):  # type: ignore[no-untyped-def]
    """Add 1 to the int64 at this address, atomically; returns what it was."""

    def codegen(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        pointer = b.inttoptr(args[0], ir.IntType(64).as_pointer())
        return b.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), codegen


@njit(nogil=True)
def chunk_of(items: int, threads: int, unit: int) -> int:
    """How many of `items` a claim takes: a multiple of `unit`, a few claims for each thread."""
    if threads == 1:
        return items
    share = items // (threads * _CHUNKS_PER_THREAD)
    return max(share - share % unit, unit)
