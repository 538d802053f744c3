"""Programmatic dependent launch: a kernel is started while the one before it in the stream still runs.

It hides the time that a kernel takes to start. `begin_kernel`, first in every kernel, makes it safe: it waits
until the kernel before has completed and its stores are visible, and only then lets the next one start. That
kernel has waited in the same way, so what follows `begin_kernel` runs after all earlier kernels of the
stream. Before it, a kernel may only ask for weights, by `prefetch`: no kernel writes these, and asking for
memory changes no result. `launch.dependent_launches` says where kernels are launched in this way. Those of
libraries are launched plainly: they wait for the kernel before, and are waited for.

A gated product lets the next kernel start only after its own loads. That is a product as well, whose programs
would take the room of the first ones that end, on a few multiprocessors: an H200 takes an eighth longer.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; `griddepcontrol` in
the PTX ISA.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def _is_dependent(_semantic: Any = None) -> Any:
    """While a kernel is compiled: whether it is for dependent launches. Not in the interpreter."""
    return _semantic is not None and tl.constexpr(_semantic.builder.options.launch_pdl)


setattr(_is_dependent, tl.core.TRITON_BUILTIN, True)  # the compiler calls it, and passes `_semantic`


@triton.jit
def begin_kernel(late: tl.constexpr = 0):
    """First in every kernel: in a dependent launch, wait for the kernel before and let the next one start.

    Nothing but `prefetch` may come before it. A `late` kernel calls `let_next_start` further down.
    """
    if _is_dependent():
        gdc_wait()
        if not late:
            gdc_launch_dependents()


@triton.jit
def let_next_start():
    """In a dependent launch, let the next kernel start when each program has come here."""
    if _is_dependent():
        gdc_launch_dependents()


@triton.jit
def prefetch(addresses):
    """In a dependent launch, ask for what lies at these addresses of weights, to be in the L2 cache."""
    if _is_dependent():
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
