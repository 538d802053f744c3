"""What /proc tells of a process and its threads. Where there is no /proc, nothing is known."""

from __future__ import annotations

import os
from pathlib import Path


def thread_cpu_s(pid: int, thread: int) -> float | None:
    """User and system time that a thread has used, in seconds; None if unknown, or the thread has ended."""
    fields = _stat(f"/proc/{pid}/task/{thread}/stat")
    if fields is None:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
