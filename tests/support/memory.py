"""What processes take of memory, as the operating system divides it among them."""

from __future__ import annotations

from pathlib import Path


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # it has just ended
            continue
        for child in children:
            found += family(int(child))
    return found


def own_bytes(pid: int) -> int:
    """PSS of a process; one that has just ended has none."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def proportional_bytes(pid: int) -> int:
    """PSS of a process and all below it."""
    return sum(map(own_bytes, family(pid)))
