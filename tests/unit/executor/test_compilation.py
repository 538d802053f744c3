"""A first start says that CPU kernels are compiled, how far that is, and that it happens once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from numba.core import event

from executor_service.backends.torch_backend.cpu.threads.compilation import compilation_told
from executor_service.backends.torch_backend.cpu.threads.dispatch import COMMON, compiled_function


def compile_kernels(count: int) -> Iterator[None]:
    for _ in range(count):
        with event.trigger_event("numba:compile", data={"dispatcher": compiled_function}):
            pass
        yield


def test_the_fraction_rises_with_each_kernel_that_is_compiled_and_ends_at_1() -> None:
    heard = list[tuple[str, float]]()
    with compilation_told(lambda what, fraction: heard.append((what, fraction))):
        for _ in compile_kernels(2 * len(COMMON)):
            with event.trigger_event("numba:compile", data={"dispatcher": None}):
                pass  # a function that is no kernel
    assert {what for what, _ in heard} == {"compiling kernels, once on this machine for this version"}
    done = [fraction for _, fraction in heard]
    assert done == sorted(done)
    assert done[:4] == pytest.approx([0, 1 / 11, 1 / 11, 1 / 11])
    assert done[-1] == 1


def test_a_block_that_compiles_nothing_is_not_mentioned() -> None:
    heard = list[str]()
    with compilation_told(lambda what, fraction: heard.append(what)):
        pass
    for _ in compile_kernels(1):  # after the block
        pass
    assert not heard
