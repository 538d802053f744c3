"""The memory of this process: how much is resident, and what the allocator gives back."""

from __future__ import annotations

import ctypes
import os


def resident_bytes() -> int:
    """Resident memory of this process, shared libraries included."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def give_back_freed() -> None:
    """Return freed memory to the system.

    glibc keeps it for later allocations: after the default model is loaded 75 MB, mostly dequantized weights
    that were packed since. Does nothing with another C library.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
