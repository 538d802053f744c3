"""A first start says how many of the CPU kernels are compiled, and that this happens once."""

from __future__ import annotations

from typing import Any

import pytest
from numba import njit

from executor_service.backends.torch_backend.compilation import compilation_told
from executor_service.backends.torch_backend.cpu.primitives.kernel import Kernel


def kernel(number: int) -> Kernel:
    def compute(record: int, chunk: int) -> None:
        pass

    def count(record: int) -> int:
        return number

    compiled: Any = njit
    declaration: Any = number
    return Kernel(declaration, compiled(count), compiled(compute))


def test_the_fraction_is_that_of_the_compiled_kernels() -> None:
    kernels, heard = [kernel(1), kernel(2)], list[tuple[str, float]]()
    with compilation_told(kernels, lambda what, fraction: heard.append((what, fraction))):
        for one in kernels:
            one.count_chunks(0)
            one.compute_chunk(0, 0)
    assert {what for what, _ in heard} == {"compiling 2 kernels, once on this machine for this version"}
    done = [fraction for _, fraction in heard]
    assert done == sorted(done)
    assert sorted(set(done)) == pytest.approx([0, 1 / 3, 2 / 3])  # what joins them is left


def test_kernels_that_are_compiled_already_are_not_mentioned() -> None:
    ready, heard = kernel(1), list[str]()
    ready.compute_chunk(0, 0)
    with compilation_told([ready], lambda what, fraction: heard.append(what)):
        ready.compute_chunk(0, 0)
    kernel(2).compute_chunk(0, 0)  # behind the block
    assert not heard
