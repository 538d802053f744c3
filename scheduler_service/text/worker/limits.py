"""Resource limits and priorities of the tokenizer process."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time

NICENESS = 1
"""Niceness of the process. A higher one would delay small prompts wherever CPU cores are shared."""
_PR_SET_PDEATHSIG = 1


def limit_memory(mib: int) -> None:
    """Limit the memory that this process may allocate, and disable core dumps."""
    kind = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
    resource.setrlimit(kind, (mib << 20, mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def extend_cpu(seconds: float) -> None:
    """Let the kernel end this process after `seconds` more of CPU time, even if the scheduler is stopped."""
    soft = int(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def die_with_parent() -> None:
    """Let the kernel kill this process when the scheduler ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def lower_priority(to: int) -> None:
    """Raise the niceness to at least `to`: of the calling thread on Linux, of the process elsewhere."""
    os.setpriority(os.PRIO_PROCESS, 0, max(to, niceness()))


def niceness() -> int:
    """Niceness of the calling thread on Linux, of the process elsewhere."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def return_memory() -> None:
    """Return freed memory to the system, which the allocator would keep (glibc only)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(0)
