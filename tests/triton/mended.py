"""Triton's interpreter, made to work.

Four things are mended, for Triton 3.6: numpy 2.4 no longer turns arrays of one element into numbers, which
loop bounds need; bfloat16, which lies in uint16 here, was multiplied as if it were integers; conversions from
and to it and fp8, which lies in uint8, were not those of a GPU; and a product's lines differed in their last
bits with their place in the matrix, as no matrix instruction's do. Also, a function called from a kernel
patches the language once, not at every call: this halves the time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any
from unittest import mock

import numpy as np
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


_BITS = {"bf16": (torch.bfloat16, torch.uint16), "fp8e4nv": (torch.float8_e4m3fn, torch.uint8)}
"""Types that numpy lacks, and those that their bits are kept as."""
_NUMBERS = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}


def _cast(numbers: np.ndarray, source: Any, target: Any) -> np.ndarray:
    """From one type to another, of which at least one is in _BITS, rounded to nearest even."""
    found = torch.from_numpy(np.require(numbers, requirements="W"))  # where it is broadcast, a copy
    if source.name in _BITS:
        found = found.view(_BITS[source.name][0])
    if target.name not in _BITS:
        return found.to(_NUMBERS[target.name]).numpy()
    dtype, bits = _BITS[target.name]
    return found.to(dtype).view(bits).numpy()


@contextmanager
def mended_interpreter() -> Iterator[None]:
    """Inside, kernels are interpreted as a GPU would compute them."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    patch_tensor, cast = interpreter._patch_lang_tensor, builder.cast_impl

    patched: set[Any] = set()

    def with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.fn not in patched:
            patched.add(function.fn)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **kwargs)

    def exact_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        wide = [
            _cast(x.data, x.dtype.scalar, tl.float32) if x.dtype.scalar == tl.bfloat16 else x.data
            for x in (a, b)
        ]
        product = wide[0].astype(np.float64) @ wide[1].astype(np.float64) + d.data
        return interpreter.TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    def rounded(self: Any, handle: Any, target: Any, *rounding: Any) -> Any:
        source, wanted = handle.dtype.scalar, target.scalar
        names = {source.name, wanted.name}
        if names & _BITS.keys() and names <= _BITS.keys() | _NUMBERS.keys():
            return interpreter.TensorHandle(_cast(handle.data, source, wanted), wanted)
        return cast(self, handle, target)

    np_dtype = interpreter._get_np_dtype

    @cache
    def constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(prod(shape))

    def new_tensor(tensor: Any, handle: Any, type: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = constants(tuple(type.shape) if type.is_block() else ())

    blocks: dict[tuple[str, tuple[int, ...]], Any] = {}

    def block_of(element: Any, shape: Any) -> Any:
        key = element.name, tuple(shape)
        if key not in blocks:
            blocks[key] = tl.block_type(element, shape)
        return blocks[key]

    numpy_types: dict[str, Any] = {}

    def numpy_type(dtype: Any) -> Any:
        if dtype.name not in numpy_types:
            numpy_types[dtype.name] = np_dtype(dtype)
        return numpy_types[dtype.name]

    unchecked = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    changes = [
        (interpreter.interpreter_builder, "options", unchecked),
        (interpreter, "_get_np_dtype", numpy_type),
        (builder, "get_block_ty", lambda self, dtype, shape: block_of(dtype, shape)),
        (tl.block_type, "with_element_ty", lambda self, scalar: block_of(scalar, self.shape)),
        (tl.tensor, "__init__", new_tensor),
        (interpreter, "_patch_lang_tensor", with_index),
        (interpreter.InterpretedFunction, "__call__", call),
        (builder, "create_dot", exact_dot),
        *(
            (builder, name, rounded)
            for name in (
                "cast_impl",
                "create_fp_ext",
                "create_fp_trunc",
                "create_fp_to_fp",
                "create_si_to_fp",
            )
        ),
    ]
    with ExitStack() as stack:
        for target, name, function in changes:
            stack.enter_context(mock.patch.object(target, name, function))
        yield
