"""From a call's words to its kernel: the list of kinds, and what makes one machine function of all of them.

A call is `Header` and then the record of its kind, as int64 words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.callconv import RETCODE_USEREXC, Status, excinfo_ptr_t
from numba.extending import intrinsic

from executor_service.backends.torch_backend.cpu.attention.attend import ATTEND_PAGES
from executor_service.backends.torch_backend.cpu.attention.rotate import ROTATE_QKV
from executor_service.backends.torch_backend.cpu.gemm.bias import ADD_BIAS
from executor_service.backends.torch_backend.cpu.gemm.low_rank import SHRINK_ROWS_FP16, SHRINK_ROWS_FP32
from executor_service.backends.torch_backend.cpu.gemm.products import PRODUCTS
from executor_service.backends.torch_backend.cpu.gemm.quantize import QUANTIZE_ROWS
from executor_service.backends.torch_backend.cpu.primitives.records import Kind, size_of
from executor_service.backends.torch_backend.cpu.rowwise.log_sum import LOG_SUM_ROWS
from executor_service.backends.torch_backend.cpu.rowwise.norm import NORM_ROWS
from executor_service.backends.torch_backend.cpu.rowwise.sampling import (
    DRAW_TOKENS,
    EXCLUDE_TOKENS,
    TAKE_LARGEST,
)


class Header(NamedTuple):
    """What `work` checks before a kernel sees the record behind it."""

    kind: int  # in KERNELS
    size: int  # of the record, in words


KERNELS = (
    *PRODUCTS, ADD_BIAS, QUANTIZE_ROWS, NORM_ROWS, ROTATE_QKV, ATTEND_PAGES, DRAW_TOKENS, TAKE_LARGEST,
    EXCLUDE_TOKENS, LOG_SUM_ROWS, SHRINK_ROWS_FP32, SHRINK_ROWS_FP16,
)  # fmt: skip

_I64 = ir.IntType(64)

RECORD_SIZES = tuple(size_of(kernel.declaration) for kernel in KERNELS)
"""Words of each kind's record."""

_NUMBERS = {kernel.declaration: number for number, kernel in enumerate(KERNELS)}


def header_of(kind: Kind) -> Header:
    """The header of calls that this declaration describes. Raises KeyError for what no kernel computes."""
    number = _NUMBERS[kind]
    return Header(number, RECORD_SIZES[number])


EmitCall = Callable[[Any, Any, Any, Any, Any], Any]
"""(numba's context, builder, njit function, its signature, arguments): emits a call that gives an int64."""


def _switch(
    typing_context: Any, functions: Sequence[Any], signature: Any, emit_call: EmitCall
) -> tuple[Any, Any]:
    """Typing and code of a function(kind, ...) that calls the kind's among `functions` with the rest."""
    called = [
        types.Dispatcher(one).get_call_type(typing_context, signature.args[1:], {}) for one in functions
    ]

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        unknown, done = b.append_basic_block("unknown"), b.append_basic_block("done")
        switch, results = b.switch(args[0], unknown), []
        b.position_at_end(unknown)
        b.unreachable()
        for number, (function, call_type) in enumerate(zip(functions, called, strict=True)):
            block = b.append_basic_block(f"kind_{number}")
            switch.add_case(ir.Constant(_I64, number), block)
            b.position_at_end(block)
            results.append((emit_call(context, b, function, call_type, args[1:]), b.block))
            b.branch(done)
        b.position_at_end(done)
        result = b.phi(results[0][0].type)
        for value, block in results:
            result.add_incoming(value, block)
        return result

    return signature, codegen


def _emit_for_result(context: Any, b: Any, function: Any, call_type: Any, args: Any) -> Any:
    """A call that gives the function's result; what the function raises is raised."""
    return context.get_function(types.Dispatcher(function), call_type)(b, args)


def _emit_for_error(context: Any, b: Any, function: Any, call_type: Any, args: Any) -> Any:
    """A call that gives the address of numba's description of what the function raised, or 0."""
    compiled = function.get_compile_result(call_type)
    context.active_code_library.add_linking_library(compiled.library)
    status, _ = context.call_internal_no_propagate(b, compiled.fndesc, call_type, args)
    error = b.ptrtoint(status.excinfoptr, _I64)
    return b.select(status.is_error, error, ir.Constant(_I64, 0))


def _count(typing_context, kind, record):  # type: ignore[no-untyped-def]
    functions = [kernel.count_chunks for kernel in KERNELS]
    return _switch(typing_context, functions, types.int64(types.int64, types.int64), _emit_for_result)


def _compute(typing_context, kind, record, chunk):  # type: ignore[no-untyped-def]
    functions = [kernel.compute_chunk for kernel in KERNELS]
    signature = types.int64(types.int64, types.int64, types.int64)
    return _switch(typing_context, functions, signature, _emit_for_error)


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


count_chunks = cast(Callable[[int, int], int], intrinsic(_count))
"""(kind, record): how many chunks this call has. The kind must be one of KERNELS."""
compute_chunk = cast(Callable[[int, int, int], int], intrinsic(_compute))
"""(kind, record, chunk): compute one of them; returns what the kernel raised, for `raise_error`, or 0."""
raise_error = cast(Callable[[int], None], intrinsic(_raise))
"""Raise what `compute_chunk` returned in any of the threads; 0: raise nothing."""
