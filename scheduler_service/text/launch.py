"""Starting and ending the operating system's process of a tokenizer process."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import scheduler_service
from scheduler_service.text.job import TextLimits

WORKER = "scheduler_service.text.worker"
"""The module that the process runs."""


def spawn_worker(limits: TextLimits, connection: socket.socket) -> subprocess.Popen[bytes]:
    """Start a new interpreter (not a fork) with `connection` as its standard input. Raises OSError."""
    # Not through asyncio: uvloop would fork, and gRPC's fork handlers log errors.
    arguments = (str(limits.memory_mib), f"{limits.cpu_s:g}")
    return subprocess.Popen(
        (sys.executable, "-P", "-m", WORKER, *arguments),
        stdin=connection.fileno(),
        stdout=subprocess.DEVNULL,
        env=_environment(),
    )


def _environment() -> dict[str, str]:
    """The scheduler's environment without its settings and secrets, and with this package on the path."""
    root = str(Path(scheduler_service.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PACELINE_")}
    return kept | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}


async def kill_and_reap(process: subprocess.Popen[bytes]) -> int:
    """Kill a process and wait for its end. Returns its exit status: its own if it has exited by itself."""
    # In a thread: waitpid does not return before all threads of the process have left /proc, not even with
    # WNOHANG, and on a busy machine a thread of low priority leaves late.
    try:
        return await asyncio.to_thread(_reap, process)
    except asyncio.CancelledError:
        _reap(process)
        raise


def _reap(process: subprocess.Popen[bytes]) -> int:
    process.kill()
    return process.wait()
