"""The CPU kernels of the default model, compiled while its file is on its way: both happen once a machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

_MODULE = "executor_service.backends.torch_backend.cpu.threads.compile_all"


@contextmanager
def compiled_meanwhile() -> Iterator[None]:
    """A context manager: a process compiles the kernels while the block runs, whose end waits for it.

    The process ends with a block that fails. If it fails itself, or no executor is installed, nothing is
    said: the executor compiles what it misses, and says why it can't.
    """
    if find_spec("executor_service") is None:
        yield
        return
    command = [sys.executable, "-m", _MODULE, "--default-model", "--unless-cuda"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet) as process:
        try:
            yield
            process.wait()
        except BaseException:
            process.terminate()
            raise
