"""Atomic operations and raw pointers for numba kernels; an address is an int64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray as carray  # type: ignore[attr-defined]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

_I32, _I64 = ir.IntType(32), ir.IntType(64)

insert_function = cast(Callable[[Any, Any, str], Any], cgutils.get_or_insert_function)
"""Declare a C or LLVM function in a module: (module, type, name) to the function."""


def _fetch_add(_typing_context, address, value):  # type: ignore[no-untyped-def]
    def codegen(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], _I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


def _load(_typing_context, address):  # type: ignore[no-untyped-def]
    def codegen(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], _I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), codegen


def _store(_typing_context, address, value):  # type: ignore[no-untyped-def]
    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        b.store_atomic(args[1], b.inttoptr(args[0], _I64.as_pointer()), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _yield(_typing_context):  # type: ignore[no-untyped-def]
    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        b.call(insert_function(b.module, ir.FunctionType(_I32, []), "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


def _pointer(_typing_context, address):  # type: ignore[no-untyped-def]
    def codegen(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


fetch_add = cast(Callable[[int, int], int], intrinsic(_fetch_add))
"""Add to the int64 at an address; returns what it was."""
load = cast(Callable[[int], int], intrinsic(_load))
"""The int64 at an address."""
store = cast(Callable[[int, int], None], intrinsic(_store))
"""Set the int64 at an address."""
yield_core = cast(Callable[[], None], intrinsic(_yield))
"""Let another thread run (sched_yield)."""
pointer = cast(Callable[[int], Any], intrinsic(_pointer))
"""An untyped pointer, for `carray`."""


@njit(nogil=True)
def floats(address: int, count: int) -> NDArray[np.float32]:
    """The fp32 array [count] at an address."""
    return carray(pointer(address), (count,), np.float32)


@njit(nogil=True)
def doubles(address: int, count: int) -> NDArray[np.float64]:
    """The fp64 array [count] at an address."""
    return carray(pointer(address), (count,), np.float64)


@njit(nogil=True)
def matrix(address: int, rows: int, columns: int) -> NDArray[np.float32]:
    """The fp32 array [rows, columns] at an address."""
    return carray(pointer(address), (rows, columns), np.float32)


@njit(nogil=True)
def ints(address: int, count: int) -> NDArray[np.int32]:
    """The int32 array [count] at an address."""
    return carray(pointer(address), (count,), np.int32)


@njit(nogil=True)
def longs(address: int, count: int) -> NDArray[np.int64]:
    """The int64 array [count] at an address."""
    return carray(pointer(address), (count,), np.int64)
