"""What the memory allocator of this process gives back."""

from __future__ import annotations

import ctypes


def give_back_freed() -> None:
    """Return freed memory to the system.

    glibc keeps it for later allocations: after the default model is loaded 75 MB, mostly dequantized weights
    that were packed since. Does nothing with another C library.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
