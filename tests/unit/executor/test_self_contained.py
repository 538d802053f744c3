"""The process that compiles the kernels computes what those do that load them from the cache, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import Linkage  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from executor_service.backends.torch_backend.cpu.primitives.memory import insert_function
from executor_service.backends.torch_backend.cpu.primitives.self_contained import SelfContained
from executor_service.backends.torch_backend.cpu.threads.dispatch import compiled_function
from executor_service.backends.torch_backend.cpu.threads.thread_pool import ThreadPool
from executor_service.backends.torch_backend.cpu.threads.work import work


def answer_of(value: int) -> Callable[[], int]:
    """A function of one name in all machine code, and of another result in each."""

    def codegen(_context: Any, caller: Any, _signature: Any, _args: Any) -> Any:
        int64 = ir.IntType(64)
        function = insert_function(caller.module, ir.FunctionType(int64, []), "paceline_test_answer")
        function.linkage = "linkonce_odr"
        for attribute in ("noinline", "optnone"):
            function.attributes.add(attribute)
        ir.IRBuilder(function.append_basic_block("entry")).ret(ir.Constant(int64, value))
        return caller.call(function, [])

    def answer(_typing_context):  # type: ignore[no-untyped-def]
        return types.int64(), codegen

    return cast(Callable[[], int], intrinsic(answer))


def test_calls_stay_in_the_machine_code_whatever_was_loaded_before() -> None:
    one, two = answer_of(1), answer_of(2)
    first = njit(pipeline_class=SelfContained)(lambda: one())
    second = njit(pipeline_class=SelfContained)(lambda: two())
    assert (first(), second()) == (1, 2)


def test_a_kernel_shares_no_function_with_other_machine_code() -> None:
    ThreadPool(1)  # compiles or loads the common ones
    compiled: Any
    for compiled in (*work.overloads.values(), *compiled_function.overloads.values()):
        functions = compiled.library._get_module_for_linking().functions
        seen = [
            one.name for one in functions if not one.is_declaration and one.linkage is not Linkage.internal
        ]
        assert len(seen) == 3  # itself, and as what Python and C call
        assert all("4work" in name or "17compiled_function" in name for name in seen)


@pytest.mark.slow
def test_every_kernel_gives_the_same_bits_compiled_and_loaded(tmp_path: Path) -> None:
    variables = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.unit.executor.kernel_results"]
    fresh, cached = (
        subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for _ in range(2)
    )
    assert (fresh.pop(), cached.pop()) == ("compiled", "loaded")
    assert fresh == cached
