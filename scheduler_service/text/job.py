"""A tokenizer process's jobs, their limits, and what is known of a process that has ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from scheduler_service.text.frames import CPU_S, MEMORY_MIB, Header

WALL_FACTOR = 12
"""Ratio of a job's wall-time limit to its CPU-time limit."""


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Memory of one tokenizer process, and time of one job in it."""

    memory_mib: int = MEMORY_MIB
    cpu_s: float = CPU_S  # for one prompt, or to load a tokenizer

    @property
    def wall_s(self) -> float:
        """Wall time after which a job counts as stuck, in seconds."""
        return WALL_FACTOR * self.cpu_s


@dataclass(eq=False, slots=True)
class TextJob:
    """One request to a tokenizer process. `future` gets the header and the payload of its answer."""

    header: Header
    payload: bytes
    lane: int
    future: asyncio.Future[tuple[Header, bytes]]
    caller: str = ""  # queues are shared among callers
    crashes: int = 0
    """Number of processes that ended for an unknown reason while they ran this job."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a tokenizer process ended, and the jobs that it was running then."""

    why: str
    running: list[TextJob]
    over_limit: TextJob | None = None
    """The job that exceeded its CPU time, if that was why the process was killed."""
    stuck: bool = False
    """The process was killed because it neither worked nor answered."""
