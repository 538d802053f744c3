"""What the processes of a stack hold, over time: memory, descriptors, threads, tasks. Pure but for /proc."""

from __future__ import annotations

import re
import statistics
import time
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.serve import Serve

SETTLED_S = 8.0  # of a life: before it loads, imports and fills pools
FIGURES = ("memory_mb", "descriptors", "threads", "tasks")
MAX_GROWTH: Mapping[str, tuple[float, float]] = {
    "memory_mb": (0.15, 8.0),
    "descriptors": (0.25, 8.0),
    "threads": (0.0, 4.0),
    "tasks": (0.25, 12.0),
}
"""A figure's growth from the first third of the soak to the last: as a share of it, and beyond that."""

_TASKS = re.compile(rb"^paceline_\w+_tasks (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Sample:
    """One process at one moment. `age_s` is that of its life as far as it was seen."""

    at: float
    role: str
    pid: int
    age_s: float
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Growth:
    """Of one figure of one role, over all its lives."""

    role: str
    figure: str
    lives: int
    first: float  # median of the first third of the time
    last: float  # of the last third
    highest: float

    @property
    def flat(self) -> bool:
        """It has not grown by more than is allowed."""
        share, beyond = MAX_GROWTH[self.figure]
        return self.last <= self.first * (1 + share) + beyond

    def __str__(self) -> str:
        verdict = "flat" if self.flat else "GROWS"
        return (
            f"{self.role:10s} {self.figure:12s} {self.lives:4d} lives {self.first:9.1f} {self.last:9.1f} "
            f"{self.highest:9.1f}  {verdict}"
        )


class Census:
    """Looks at all processes of one `serve`, and remembers."""

    def __init__(self, serve: Serve, metrics_ports: Mapping[str, int]) -> None:
        self._serve, self._metrics_ports = serve, metrics_ports
        self._born: dict[int, float] = {}
        self.samples: list[Sample] = []

    def processes(self) -> dict[str, int]:
        """Process ids by role; `tokenizer`, `tokenizer2`: the scheduler's children."""
        found = {"serve": self._serve.process.pid}
        for name, pid in self._serve.children().items():
            found[name.removesuffix("_service")] = pid
        if scheduler := found.get("scheduler"):
            for number, pid in enumerate(tokenizers_of(scheduler)):
                found[f"tokenizer{number + 1 if number else ''}"] = pid
        return found

    def look(self) -> None:
        """Take a sample of each process. A process that is just ending is left out."""
        now = time.monotonic()
        for role, pid in self.processes().items():
            born = self._born.setdefault(pid, now)
            try:
                figures = _figures(pid)
            except (OSError, ValueError, IndexError):
                continue
            if (port := self._metrics_ports.get(role)) and (tasks := _tasks(port)) is not None:
                figures["tasks"] = tasks
            self.samples.append(Sample(now, role, pid, now - born, figures))

    def growth(self) -> list[Growth]:
        """Of all figures of all roles, of settled lives."""
        settled = [sample for sample in self.samples if sample.age_s >= SETTLED_S]
        return [
            growth
            for role in dict.fromkeys(sample.role for sample in settled)
            for figure in FIGURES
            if (growth := _growth(role, figure, [one for one in settled if one.role == role])) is not None
        ]


def _growth(role: str, figure: str, samples: Iterable[Sample]) -> Growth | None:
    known = [(one.at, one.figures[figure], one.pid) for one in samples if figure in one.figures]
    if not known:
        return None
    begin, end = known[0][0], known[-1][0]
    third = (end - begin) / 3
    first = [value for at, value, _ in known if at <= begin + third]
    last = [value for at, value, _ in known if at >= end - third]
    lives = len({pid for _, _, pid in known})
    highest = max(value for _, value, _ in known)
    return Growth(role, figure, lives, statistics.median(first), statistics.median(last), highest)


def _figures(pid: int) -> dict[str, float]:
    process = Path(f"/proc/{pid}")
    return {
        "memory_mb": memory_mb(pid),
        "descriptors": float(len(list((process / "fd").iterdir()))),
        "threads": float(len(list((process / "task").iterdir()))),
    }


def _tasks(port: int) -> float | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=1) as reply:
            found = _TASKS.search(reply.read())
    except OSError:  # it is being replaced, or stopped
        return None
    return float(found[1]) if found else None


def memory_mb(pid: int) -> float:
    """Resident memory of a process. Raises OSError."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


def tokenizers_of(pid: int) -> list[int]:
    """Process ids of a scheduler's tokenizers."""
    try:
        lists = sorted(Path(f"/proc/{pid}/task").glob("*/children"))
        found = [int(one) for children in lists for one in children.read_text().split()]
        return [one for one in found if b"text.worker" in Path(f"/proc/{one}/cmdline").read_bytes()]
    except OSError:
        return []
