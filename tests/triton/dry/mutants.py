"""A kernel that waits for the kernel before it, and mutants that do not, or not in time."""

from __future__ import annotations

import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel


@triton.jit
def in_order(out):
    begin_kernel()
    tl.store(out, tl.load(out) + 1)


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
