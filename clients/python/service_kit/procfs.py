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


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process, all of its threads together."""

    cpu_s: float
    """User and system time, in seconds; also of threads that have ended."""
    is_runnable: bool
    """A thread of it is."""
    is_stopped: bool
    """By a signal such as SIGSTOP."""


def process_state(pid: int) -> ProcessState | None:
    """None if unknown, or the process has ended."""
    fields = _stat(f"/proc/{pid}/stat")
    if fields is None:
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    try:
        threads = [thread_state(pid, int(entry)) for entry in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return None
    return ProcessState(cpu_s, any(one is not None and one.is_runnable for one in threads), fields[0] == "T")


def _stat(path: str) -> list[str] | None:
    """Fields of a stat file from the third, the state, on (proc_pid_stat(5)); None if it can't be read."""
    try:
        return Path(path).read_text().rpartition(")")[2].split()
    except OSError:
        return None
