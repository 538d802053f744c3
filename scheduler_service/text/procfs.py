"""What /proc tells of a process and its threads. Where there is no /proc, nothing is known."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ThreadState:
    """One thread: what it has used, and whether it could use more now."""

    cpu_s: float
    """User and system time, in seconds."""
    is_runnable: bool
    """It has a processor, or waits for nothing else."""


def thread_state(pid: int, thread: int) -> ThreadState | None:
    """None if unknown, or the thread has ended."""
    fields = _stat(f"/proc/{pid}/task/{thread}/stat")
    if fields is None:
        return None
    return ThreadState((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] == "R")


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal such as SIGSTOP; False if unknown."""
    fields = _stat(f"/proc/{pid}/stat")
    return fields is not None and fields[0] == "T"


def _stat(path: str) -> list[str] | None:
    """Fields of a stat file from the third, the state, on (proc_pid_stat(5)); None if it can't be read."""
    try:
        return Path(path).read_text().rpartition(")")[2].split()
    except OSError:
        return None
