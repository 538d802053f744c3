"""From a call's words to its kernel: the list of kinds, and a machine function for each.

A call is `Header` and then the record of its kind, as int64 words. A kernel is compiled, or read from numba's
cache, when its kind is first wanted (`require`): so a model compiles the products of its own weights alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core.callconv import RETCODE_USEREXC, Status, excinfo_ptr_t
from numba.extending import intrinsic
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.attention.attend import ATTEND_PAGES
from executor_service.backends.torch_backend.cpu.attention.rotate import ROTATE_QKV
from executor_service.backends.torch_backend.cpu.gemm.bias import ADD_BIAS
from executor_service.backends.torch_backend.cpu.gemm.block_products import BLOCK_PRODUCTS
from executor_service.backends.torch_backend.cpu.gemm.low_rank import SHRINK_ROWS_FP16, SHRINK_ROWS_FP32
from executor_service.backends.torch_backend.cpu.gemm.products import PRODUCTS
from executor_service.backends.torch_backend.cpu.gemm.quantize import QUANTIZE_ROWS
from executor_service.backends.torch_backend.cpu.gemm.quantize_blocks import QUANTIZE_BLOCKS
from executor_service.backends.torch_backend.cpu.primitives.kernel import Kernel
from executor_service.backends.torch_backend.cpu.primitives.records import Address, Kind, address_of, size_of
from executor_service.backends.torch_backend.cpu.primitives.self_contained import SelfContained
from executor_service.backends.torch_backend.cpu.rowwise.log_sum import LOG_SUM_ROWS
from executor_service.backends.torch_backend.cpu.rowwise.norm import NORM_ROWS
from executor_service.backends.torch_backend.cpu.rowwise.sampling import (
    DRAW_TOKENS,
    EXCLUDE_TOKENS,
    TAKE_LARGEST,
)


class Header(NamedTuple):
    """What `work` checks before a kernel sees the record after it."""

    kind: int  # in KERNELS
    size: int  # of the record, in words


COMMON = (
    ADD_BIAS, NORM_ROWS, ROTATE_QKV, ATTEND_PAGES, DRAW_TOKENS, TAKE_LARGEST, EXCLUDE_TOKENS, LOG_SUM_ROWS,
)  # fmt: skip
"""The kernels that every model needs."""
KERNELS = (
    *COMMON, *PRODUCTS, QUANTIZE_ROWS, SHRINK_ROWS_FP32, SHRINK_ROWS_FP16, *BLOCK_PRODUCTS, QUANTIZE_BLOCKS,
)  # fmt: skip

COUNT = -1
"""In place of a chunk's number: how many chunks the call has."""

_I32, _I64 = ir.IntType(32), ir.IntType(64)

RECORD_SIZES = tuple(size_of(kernel.declaration) for kernel in KERNELS)
"""Words of each kind's record."""

_NUMBERS = {kernel.declaration: number for number, kernel in enumerate(KERNELS)}

_functions: NDArray[np.int64] = np.zeros(len(KERNELS), np.int64)
FUNCTIONS: Address = address_of(_functions)
"""The address of the kinds' machine functions, an int64 each; 0: not compiled yet. Written by `require`."""


def header_of(kind: Kind) -> Header:
    """The header of calls that this declaration describes. Raises KeyError for what no kernel computes.

    Compiles the kernel if it was not wanted before.
    """
    number = _NUMBERS[kind]
    if not _functions[number]:
        require(KERNELS[number])
    return Header(number, RECORD_SIZES[number])


def require(kernel: Kernel) -> None:
    """Compile a kernel, or load it from the cache; nothing if that was done."""
    number = _NUMBERS[kernel.declaration]
    if _functions[number]:
        return
    dispatcher: Any = compiled_function
    signature = cast(Any, types).literal(number), types.int64, types.int64
    dispatcher.compile(signature)
    compiled = dispatcher.overloads[signature]
    _functions[number] = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)


def _run(typing_context, number, record, chunk):  # type: ignore[no-untyped-def]
    """Typing and code of the kernel with a literal number: counts its chunks, or computes one of them."""
    kernel: Any = KERNELS[number.literal_value]
    count, compute = (
        (types.Dispatcher(one), types.Dispatcher(one).get_call_type(typing_context, arguments, {}))
        for one, arguments in (
            (kernel.count_chunks, (types.int64,)),
            (kernel.compute_chunk, (types.int64, types.int64)),
        )
    )

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        with b.if_else(b.icmp_signed("==", args[2], ir.Constant(_I64, COUNT))) as (then, otherwise):
            with then:
                counted = context.get_function(*count)(b, args[1:2])
                after_count = b.block
            with otherwise:
                compiled = kernel.compute_chunk.get_compile_result(compute[1])
                context.active_code_library.add_linking_library(compiled.library)
                status, _ = context.call_internal_no_propagate(b, compiled.fndesc, compute[1], args[1:])
                error = b.ptrtoint(status.excinfoptr, _I64)
                raised = b.select(status.is_error, error, ir.Constant(_I64, 0))
                after_compute = b.block
        result = b.phi(_I64)
        result.add_incoming(counted, after_count)
        result.add_incoming(raised, after_compute)
        return result

    return types.int64(number, types.int64, types.int64), codegen


_run_kernel = cast(Callable[[int, int, int], int], intrinsic(prefer_literal=True)(_run))


@njit(nogil=True, cache=True, pipeline_class=SelfContained)
def compiled_function(number: int, record: int, chunk: int) -> int:
    """The kernel with a literal `number`, which is compiled as a function of its own: see `call_kernel`."""
    return _run_kernel(number, record, chunk)


def _call(_typing_context, function, record, chunk):  # type: ignore[no-untyped-def]
    def codegen(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        # Numba's own convention: places for result and error, then the arguments. It returns a status, which
        # does not matter here, because `compiled_function` raises nothing itself.
        kind = ir.FunctionType(_I32, [_I64.as_pointer(), excinfo_ptr_t.as_pointer(), _I64, _I64, _I64])
        with b.goto_entry_block():
            result, error = b.alloca(_I64), b.alloca(excinfo_ptr_t)
        number = ir.Constant(_I64, 0)  # the literal, which the machine code knows
        b.call(b.inttoptr(args[0], kind.as_pointer()), [result, error, number, *args[1:]])
        return b.load(result)

    return types.int64(types.int64, types.int64, types.int64), codegen


def _raise(_typing_context, error):  # type: ignore[no-untyped-def]
    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        with b.if_then(b.icmp_signed("!=", args[0], ir.Constant(_I64, 0)), likely=False):
            status = Status(
                code=RETCODE_USEREXC,
                excinfoptr=b.inttoptr(args[0], excinfo_ptr_t),
                **dict.fromkeys(set(Status._fields) - {"code", "excinfoptr"}),
            )
            context.call_conv.return_status_propagate(b, status)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


call_kernel = cast(Callable[[int, int, int], int], intrinsic(_call))
"""(function, record, chunk): compute a chunk; returns what the kernel raised, for `raise_error`, or 0.

With COUNT for the chunk: how many chunks the call has. `function` is one of FUNCTIONS, and not 0.
"""
raise_error = cast(Callable[[int], None], intrinsic(_raise))
"""Raise what `call_kernel` returned in any of the threads; 0: raise nothing."""
