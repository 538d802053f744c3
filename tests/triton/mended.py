"""Triton's interpreter, made to work.

Four things are mended, for Triton 3.6: numpy 2.4 no longer turns arrays of one element into numbers, which
loop bounds need; bfloat16, which lies in uint16 here, was multiplied as if it were integers; a product's
lines differed in their last bits with their place in the matrix, as no matrix instruction's do; and
conversions to and from fp8 lost carries, zero and what is below the normal numbers. Also,
a function called from a kernel patches the language once, not at every call: this halves the time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _cast(from_bits: np.ndarray, source: Any, target: Any) -> np.ndarray:
    """bfloat16 bits to fp32 or back, rounded to nearest even."""
    if source.name == "bf16":
        return (from_bits.astype(np.uint32) << 16).view(np.float32)
    return torch.from_numpy(from_bits).bfloat16().view(torch.uint16).numpy()


def _from_fp8(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(bits.copy()).view(torch.float8_e4m3fn).float().numpy()


def _to_fp8(wide: np.ndarray) -> np.ndarray:
    return torch.from_numpy(wide.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


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
        if handle.dtype.scalar == tl.float8e4nv and target.scalar == tl.float16:
            return interpreter.TensorHandle(_from_fp8(handle.data).astype(np.float16), tl.float16)
        if handle.dtype.scalar == tl.float32 and target.scalar == tl.float8e4nv:
            return interpreter.TensorHandle(_to_fp8(handle.data), tl.float8e4nv)
        if {handle.dtype.scalar, target.scalar} == {tl.bfloat16, tl.float32}:
            return interpreter.TensorHandle(
                _cast(handle.data, handle.dtype.scalar, target.scalar), target.scalar
            )
        return cast(self, handle, target)

    changes = [
        (interpreter, "_patch_lang_tensor", with_index),
        (interpreter.InterpretedFunction, "__call__", call),
        (builder, "create_dot", exact_dot),
        *(
            (builder, name, rounded)
            for name in ("cast_impl", "create_fp_ext", "create_fp_trunc", "create_fp_to_fp")
        ),
    ]
    with ExitStack() as stack:
        for target, name, function in changes:
            stack.enter_context(mock.patch.object(target, name, function))
        yield
