"""What a process does, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.cli.pulse import Activity

_AT_WORK = "RD"  # on a processor or queued for one, waiting for a disk


def activity(pid: int) -> Activity:
    """What the threads of a process do at this moment. UNKNOWN where there is no /proc, or no process."""
    folder = Path("/proc") / str(pid)
    state = _state(folder)
    if state is None:
        return Activity.UNKNOWN
    if state == "T":
        return Activity.STOPPED
    if state == "t":
        return Activity.TRACED
    try:
        threads = os.listdir(folder / "task")
    except OSError:
        return Activity.UNKNOWN
    busy = any((_state(folder / "task" / thread) or "S") in _AT_WORK for thread in threads)
    return Activity.BUSY if busy else Activity.IDLE


def _state(folder: Path) -> str | None:
    """The state's letter, behind the command in parentheses, which may hold anything."""
    try:
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
