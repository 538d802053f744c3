"""The CPU kernels of the default model, compiled while its file is on its way: both happen once a machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.cli.common import stderr

_MODULE = "executor_service.backends.torch_backend.cpu.threads.compile_all"


@contextmanager
def compiled_meanwhile() -> Iterator[None]:
    """A context manager: a process compiles the kernels while the block runs, whose end waits for it.

    What the end waits for is shown on stderr. In the block other bars may be shown, at its end no more.
    The process ends with a block that fails. If it fails itself, or no executor is installed, nothing is
    said: the executor compiles what it misses, and says why it can't.
    """
    if find_spec("executor_service") is None:
        yield
        return
    command = [sys.executable, "-m", _MODULE, "--default-model", "--unless-cuda"]
    quiet = subprocess.DEVNULL
    began = time.monotonic()
    with subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet) as process:
        try:
            yield
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bars:
                bars.add_task("Compiling CPU kernels, once on this machine", total=None)
                process.wait()
        except BaseException:
            process.terminate()
            raise
    stderr.print(f"CPU kernels compiled after {time.monotonic() - began:.0f} s", highlight=False)
