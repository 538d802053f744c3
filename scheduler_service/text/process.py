"""One tokenizer process, as the scheduler sees it: started, given jobs, watched, killed.

A job is over its limit when the CPU time of its thread says so, which /proc tells: neither a busy machine
nor one that stands still makes a job late. Where there is no /proc, and when the process neither works nor
answers, wall time decides, of which pauses of our own do not count. A process that somebody has stopped
(SIGSTOP) is told from a slow one by its state, and given up much sooner.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import scheduler_service
from scheduler_service.text.frames import (
    EXIT_MEMORY,
    LARGE_NICENESS,
    PREFIX,
    Header,
    decode_header,
    encode_head,
    frame_lengths,
)

WORKER = "scheduler_service.text.worker"
"""The module that runs there."""
WATCH_INTERVAL_S = 0.1
LONG_CPU_S = 0.05
"""What a job may take between two looks before it is ranked with the large ones."""
MAX_TICKS = 3
"""A longer time between two looks at a job was our own pause, and does not count as its."""
WALL_FACTOR = 12
"""The limit in wall time, in limits of CPU time."""
MAX_STOPPED_S = 5.0
"""How long a process with a job may be stopped while we are not: who stops all continues all."""
START_TIMEOUT_S = 60.0
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TextLimits:
    """What a tokenizer process may take."""

    memory_mib: int = 1536
    cpu_s: float = 10.0  # of one job, or of loading a tokenizer

    @property
    def wall_s(self) -> float:
        """Of one job."""
        return WALL_FACTOR * self.cpu_s


@dataclass(eq=False, slots=True)
class Job:
    """Something for a tokenizer process to do. `future` gets the answer's header and payload."""

    header: Header
    payload: bytes
    lane: int
    future: asyncio.Future[tuple[Header, bytes]]
    caller: str = ""  # among whom the lanes are shared
    deaths: int = 0
    """How often a process ended while it worked on this, for no reason that was known."""


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended: what it was working on, and whose fault it was, if that is known."""

    why: str
    running: list[Job]
    culprit: Job | None = None
    stuck: bool = False
    """It neither worked nor answered."""


class StartError(Exception):
    """The process could not be started; the message says why."""


@dataclass(slots=True)
class _Lane:
    thread: int  # its id, for /proc
    job: Job | None = None
    wall_s: float = 0.0
    cpu_from: float | None = None  # CPU time of the thread when the job was first looked at
    is_lowered: bool = False  # its priority


class TextProcess:
    """A running tokenizer process. `freed` is called when a lane has become free."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        threads: list[int],
        limits: TextLimits,
        freed: Callable[[], None],
    ) -> None:
        self.loaded = False
        self.alone = False
        """It works on a job beside which nothing else may run."""
        self._process = process
        self._reader, self._writer = reader, writer
        self._limits = limits
        self._freed = freed
        self._lanes = [_Lane(thread) for thread in threads]
        self._culprit: Job | None = None
        self._stuck = False
        self._watch: asyncio.TimerHandle | None = None
        self._looked_at = 0.0
        self._stopped_s = 0.0

    @classmethod
    async def start(cls, limits: TextLimits, freed: Callable[[], None]) -> TextProcess:
        """Start one and wait until it is there. Raises StartError."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = _spawn(limits, theirs)
        writer = None
        try:
            reader, writer = await asyncio.open_connection(sock=ours, limit=READ_BYTES)
            async with asyncio.timeout(START_TIMEOUT_S):
                hello, _ = await _read(reader)
            return cls(process, reader, writer, hello["threads"], limits, freed)
        except BaseException as error:
            ours.close() if writer is None else writer.transport.abort()
            status = await _end(process)
            if isinstance(error, asyncio.IncompleteReadError | OSError | ValueError | LookupError):
                raise StartError(f"the tokenizer process does not start (status {status})") from error
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def idle(self) -> bool:
        """It works on nothing."""
        return all(lane.job is None for lane in self._lanes)

    def free(self, lane: int) -> bool:
        """Whether a job could begin at once."""
        return self._lanes[lane].job is None

    def send(self, job: Job) -> None:
        """Begin a job; its lane must be free."""
        state = self._lanes[job.lane]
        assert state.job is None
        state.job, state.wall_s, state.cpu_from = job, 0.0, None
        self._writer.write(encode_head(job.header | {"lane": job.lane}, len(job.payload)))
        self._writer.write(job.payload)
        if self._watch is None:
            self._look_later()

    async def run(self) -> End:
        """Bring answers to their jobs until the process ends, and say how it did."""
        try:
            while True:
                header, payload = await _read(self._reader)
                self._answered(header["lane"], header, payload)
        except (asyncio.IncompleteReadError, OSError, ValueError, LookupError):
            pass
        finally:
            if self._watch is not None:
                self._watch.cancel()
            self._writer.transport.abort()
            status = await _end(self._process)
        return End(self._reason(status), self._running(), self._culprit, self._stuck)

    def _kill(self, culprit: Job | None) -> None:
        self._culprit, self._stuck = culprit, culprit is None
        self._writer.transport.abort()  # which ends `run`

    def _answered(self, lane: int, header: Header, payload: bytes) -> None:
        state = self._lanes[lane]
        job, state.job = state.job, None
        if "thread" in header:
            state.thread, state.is_lowered = header["thread"], False
        if job is not None and not job.future.done():
            job.future.set_result((header, payload))
        self._freed()

    def _running(self) -> list[Job]:
        return [lane.job for lane in self._lanes if lane.job is not None]

    def _reason(self, status: int) -> str:
        memory = self._limits.memory_mib
        if self._stuck:
            return "the tokenizer does not answer"
        if self._culprit is not None or status == -signal.SIGXCPU:
            return f"it takes more than {self._limits.cpu_s:g} s of CPU time"
        if status == EXIT_MEMORY:
            return f"it takes more than {memory} MiB of memory"
        return f"the tokenizer process ended with status {status}; it may take {memory} MiB of memory"

    # Watching

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._looked_at = loop.time()
        self._watch = loop.call_later(WATCH_INTERVAL_S, self._look)

    def _look(self) -> None:
        self._watch = None
        elapsed = asyncio.get_running_loop().time() - self._looked_at
        elapsed = min(elapsed, MAX_TICKS * WATCH_INTERVAL_S)
        self._stopped_s = self._stopped_s + elapsed if is_stopped(self.pid) else 0.0
        if self._stopped_s > MAX_STOPPED_S and not self.idle:
            self._kill(None)
            return
        for state in self._lanes:
            if state.job is None:
                continue
            state.wall_s += elapsed
            cpu = thread_cpu_s(self.pid, state.thread)
            if cpu is not None and state.cpu_from is None:
                state.cpu_from = cpu
            taken = 0.0 if cpu is None else cpu - (state.cpu_from or 0.0)
            if taken > self._limits.cpu_s:
                self._kill(state.job)
                return
            if taken > LONG_CPU_S and not state.is_lowered:
                state.is_lowered = True
                _lower_priority(state.thread)
            if state.wall_s > self._limits.wall_s:
                self._kill(None)
                return

        if not self.idle:
            self._look_later()


def thread_cpu_s(pid: int, thread: int) -> float | None:
    """User and system time of a thread so far; None where /proc does not tell, or it has ended."""
    fields = _stat(f"/proc/{pid}/task/{thread}/stat")
    if fields is None:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _lower_priority(thread: int) -> None:
    """Rank a thread of ours with the large jobs; it may have ended."""
    with suppress(OSError):
        niceness = max(LARGE_NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal; False where /proc does not tell."""
    fields = _stat(f"/proc/{pid}/stat")
    return fields is not None and fields[0] == "T"


def _stat(path: str) -> list[str] | None:
    """The fields behind the name, from the state on."""
    try:
        return Path(path).read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _spawn(limits: TextLimits, connection: socket.socket) -> subprocess.Popen[bytes]:
    """A new interpreter, never a fork."""
    # Not through asyncio: uvloop would fork, at which gRPC's handlers of forks complain.
    arguments = (str(limits.memory_mib), f"{limits.cpu_s:g}")
    return subprocess.Popen(
        (sys.executable, "-P", "-m", WORKER, *arguments),
        stdin=connection.fileno(),
        stdout=subprocess.DEVNULL,
        env=_environment(),
    )


def _environment() -> dict[str, str]:
    """Ours, but for secrets, and so that this very package is found."""
    root = str(Path(scheduler_service.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PACELINE_")}
    return kept | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}


async def _read(reader: asyncio.StreamReader) -> tuple[Header, bytes]:
    head, payload = frame_lengths(await reader.readexactly(PREFIX.size))
    return decode_header(await reader.readexactly(head)), await reader.readexactly(payload)


async def _end(process: subprocess.Popen[bytes]) -> int:
    """Kill and reap it; returns the exit status, which is its own if it was about to end."""
    # Not on the event loop. A process leaves the system once its threads have left /proc; meanwhile waitpid
    # does not return, not even with WNOHANG, and a thread of low priority leaves late on a busy machine.
    try:
        return await asyncio.to_thread(_reap, process)
    except asyncio.CancelledError:
        _reap(process)
        raise


def _reap(process: subprocess.Popen[bytes]) -> int:
    process.kill()
    return process.wait()
