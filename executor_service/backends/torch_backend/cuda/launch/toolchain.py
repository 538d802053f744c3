"""What Triton needs of the machine, found out before a model is loaded and not at the first launch."""

from __future__ import annotations

import os
import shutil

import triton

from executor_service.backends.base import ModelError


def check_toolchain() -> None:
    """Raises ModelError where Triton can't build the code that launches its kernels.

    That is C, compiled on the machine unless it is in Triton's cache.
    """
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # of the compiler, of the system, or Triton's own
        if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
            raise ModelError(
                "Triton needs a C compiler to launch kernels: install gcc or clang, or name one in CC"
            ) from error
        raise ModelError(
            f"Triton can't be used here; it needs CUDA's driver and the C headers of Python: {error}"
        ) from error
