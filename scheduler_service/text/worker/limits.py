"""What the tokenizer process may take: memory, and how it is ranked beside the scheduler."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time

NICENESS = 1
"""Of the process. More would make small prompts wait wherever the processor is shared."""
_PR_SET_PDEATHSIG = 1


def limit_memory(mib: int) -> None:
    """Bound what this process may allocate, and leave no core of that size."""
    kind = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
    resource.setrlimit(kind, (mib << 20, mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def extend_cpu(seconds: float) -> None:
    """Let the kernel end this process after so much more CPU time, also when nobody looks after it."""
    soft = int(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def die_with_parent() -> None:
    """End with the scheduler, even while nobody reads the end of standard input; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def lower_priority(to: int) -> None:
    """To this niceness at least, of the calling thread where threads have priorities (Linux)."""
    os.setpriority(os.PRIO_PROCESS, 0, max(to, niceness()))


def niceness() -> int:
    """Of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def return_memory() -> None:
    """Give back to the system what was freed; the allocator would keep it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(0)
