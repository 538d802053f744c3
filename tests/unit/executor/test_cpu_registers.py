"""Products are right at the narrower vectors too, on a processor that has wide ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import binding  # type: ignore[import-untyped]

from executor_service.backends.torch_backend.cpu.primitives import registers

HERE = Path(__file__).parent
NARROW = binding.get_host_cpu_features().flatten().replace("+avx512", "-avx512")
PRINT = (
    "from executor_service.backends.torch_backend.cpu.primitives import registers; print(registers.VECTOR)"
)


@pytest.mark.parametrize("most", [6, 12])
@pytest.mark.parametrize("left", range(1, 30))
def test_tiles_are_few_and_none_is_thin(left: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registers, "MAX_ROWS", most)
    sizes, rows = [], left
    while rows:
        sizes.append(registers.tile_rows.py_func(rows))
        rows -= sizes[-1]
    assert len(sizes) == -(-left // most)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "compile_for",
    [
        {"NUMBA_CPU_FEATURES": NARROW},
        {"NUMBA_CPU_FEATURES": NARROW.replace("+f16c", "-f16c")},
        {"NUMBA_CPU_NAME": "generic"},
    ],
    ids=["avx2", "without-f16c", "generic"],
)
def test_kernels_are_right_on_lesser_processors(compile_for: dict[str, str]) -> None:
    environment = {**os.environ, **compile_for}
    printed = subprocess.run([sys.executable, "-c", PRINT], env=environment, capture_output=True, check=True)
    assert printed.stdout.strip() == b"8"
    names = "test_cpu_kernels.py", "test_int8_kernels.py", "test_block_kernels.py", "test_cpu_stack.py"
    files = [str(HERE / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
