"""Reads from /proc whether a process is computing, waiting or stopped."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.cli.freeze_detector import Activity

_BUSY_STATES = "RD"  # R: on a processor or queued for one; D: waiting for a disk


def activity(pid: int) -> Activity:
    """The present activity of a process's threads. UNKNOWN if there is no /proc or no such process."""
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
    busy = any((_state(folder / "task" / thread) or "S") in _BUSY_STATES for thread in threads)
    return Activity.BUSY if busy else Activity.IDLE


def _state(folder: Path) -> str | None:
    """The letter of a process's or thread's state; None if it is gone."""
    try:
        # The state follows the command's name in parentheses, which may itself contain parentheses.
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
