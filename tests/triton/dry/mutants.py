"""Kernels that wait for the kernel before them, and mutants that do not, or not in time.

No kernel writes `weight`; others write `out`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import (
    begin_kernel,
    let_next_start,
    prefetch,
)


@triton.jit
def in_order(out):
    begin_kernel()
    tl.store(out, tl.load(out) + 1)


@triton.jit
def asks_in_order(out, weight, stride):
    at = tl.program_id(0) * stride + tl.arange(0, 64)
    prefetch(weight + at)
    begin_kernel()
    tl.store(out + at, tl.load(weight + at))


@triton.jit
def lets_start_late(out, stride):
    begin_kernel(late=1)
    total = tl.zeros([64], tl.int32)
    for i in range(stride):
        total += tl.load(out + i * 64 + tl.arange(0, 64))
    let_next_start()
    tl.store(out + tl.arange(0, 64), total)


@triton.jit
def lets_start_on_one_path(out, stride):
    begin_kernel(late=1)
    if tl.load(out) > stride:
        tl.store(out, 1)
        let_next_start()
    tl.store(out + 1, 2)


@triton.jit
def lets_start_again(out, stride):
    begin_kernel(late=1)
    for i in range(stride):
        tl.store(out + i, tl.load(out + i) + 1)
        let_next_start()


@triton.jit
def lets_start_first(out):
    let_next_start()
    begin_kernel(late=1)
    tl.store(out, 1)


@triton.jit
def waits_never(out):
    tl.store(out, tl.load(out) + 1)


@triton.jit
def loads_first(out):
    number = tl.load(out)
    begin_kernel()
    tl.store(out, number + 1)


@triton.jit
def stores_first(out):
    tl.store(out, 1)
    begin_kernel()


@triton.jit
def counts_first(out):
    tl.atomic_add(out, 1)
    begin_kernel()


@triton.jit
def leaves_first(out):
    if tl.program_id(0) > 3:
        return
    begin_kernel()
    tl.store(out, 1)


@triton.jit
def begins_twice(out):
    begin_kernel()
    tl.store(out, 1)
    begin_kernel()


@triton.jit
def asks_for_results(out, weight, stride):
    at = tl.program_id(0) * stride + tl.arange(0, 64)
    prefetch(out + at)
    begin_kernel()
    tl.store(out + at, tl.load(weight + at))


@triton.jit
def asks_for_either(out, weight, stride):
    at = tl.program_id(0) * stride + tl.arange(0, 64)
    prefetch(tl.where(at < stride, weight, out) + at)
    begin_kernel()
    tl.store(out + at, tl.load(weight + at))


@triton.jit
def asks_for_what_results_name(out, weight):
    prefetch(weight + tl.load(out))
    begin_kernel()
    tl.store(out, 1)


@triton.jit
def loads_weights_first(out, weight):
    number = tl.load(weight)
    begin_kernel()
    tl.store(out, number)


@triton.jit
def asks_too_late(out, weight):
    begin_kernel()
    prefetch(weight + tl.arange(0, 64))
    tl.store(out, 1)
