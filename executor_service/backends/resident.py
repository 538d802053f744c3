"""How much memory of a process is resident."""

from __future__ import annotations

import os


def resident_bytes(pid: int | None = None) -> int:
    """Resident memory of a process, None for this one, shared libraries included; 0: it has ended."""
    try:
        with open(f"/proc/{pid or 'self'}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0
