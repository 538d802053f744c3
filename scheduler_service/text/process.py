"""One tokenizer process as the scheduler sees it: started, given jobs, watched, killed.

A job's limit is CPU time of the thread that runs it, read from /proc: a busy or suspended machine does not
make a job exceed it. Wall time decides where there is no /proc, and when the process neither works nor
answers; pauses of the scheduler itself do not count, nor does time in which the job's thread works or waits
for a processor. A process of which no thread works is killed sooner, by the rule of all helper processes
(service_kit.standstill).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from service_kit.procfs import ThreadState, thread_state
from service_kit.standstill import Standstill

from scheduler_service.text.frames import (
    EXIT_MEMORY,
    LARGE_NICENESS,
    PREFIX,
    Header,
    decode_header,
    encode_head,
    frame_lengths,
)
from scheduler_service.text.job import ProcessEnd, TextJob, TextLimits
from scheduler_service.text.launch import kill_and_reap, spawn_worker

WATCH_INTERVAL_S = 0.1
LONG_CPU_S = 0.05
"""CPU time after which a job's thread gets the priority of large jobs."""
MAX_TICKS = 3
"""Watch intervals that count between two checks at most: if more time passed, the scheduler was paused."""
START_TIMEOUT_S = 60.0
READ_BYTES = 1 << 20


class StartError(Exception):
    """The process could not be started; the message says why."""


@dataclass(slots=True)
class _LaneThread:
    """The process's thread for one lane, and the job that it runs."""

    id: int  # the operating system's, for /proc
    job: TextJob | None = None
    wall_s: float = 0.0  # in which the job had no answer and the thread did not work
    cpu_from: float | None = None  # CPU time of the thread at the first check of the job
    cpu_s: float | None = None  # CPU time of the thread at the last check
    is_lowered: bool = False  # its priority

    def progress(self, thread: ThreadState | None) -> tuple[float, bool]:
        """Seconds of CPU time that the job has used, and whether it works or waits for a processor."""
        if thread is None:
            return 0.0, False
        is_working = thread.is_runnable or thread.cpu_s != self.cpu_s
        self.cpu_s = thread.cpu_s
        if self.cpu_from is None:
            self.cpu_from = thread.cpu_s
        return thread.cpu_s - self.cpu_from, is_working


class TextProcess:
    """A running tokenizer process; each of its lanes runs one job at a time.

    `freed` is called when a lane has answered its job. `threads`: the operating system's ids, one per lane.
    """

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
        self.exclusive = False
        """The process runs an isolated job: no other may be sent."""
        self._process = process
        self._reader, self._writer = reader, writer
        self._limits = limits
        self._freed = freed
        self._threads = [_LaneThread(thread) for thread in threads]
        self._over_limit: TextJob | None = None
        self._stuck = False
        self._watch: asyncio.TimerHandle | None = None
        self._checked_at = 0.0
        self._standstill = Standstill(process.pid)

    @classmethod
    async def start(cls, limits: TextLimits, freed: Callable[[], None]) -> TextProcess:
        """Start a process and wait for its first message. Raises StartError, OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = spawn_worker(limits, theirs)
        writer = None
        try:
            reader, writer = await asyncio.open_connection(sock=ours, limit=READ_BYTES)
            async with asyncio.timeout(START_TIMEOUT_S):
                hello, _ = await _read(reader)
            return cls(process, reader, writer, hello["threads"], limits, freed)
        except BaseException as error:
            ours.close() if writer is None else writer.transport.abort()
            status = await kill_and_reap(process)
            if isinstance(error, asyncio.IncompleteReadError | OSError | ValueError | LookupError):
                raise StartError(f"the tokenizer process does not start (status {status})") from error
            raise

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def connected(self) -> bool:
        """Whether the process can be sent jobs: its connection closes when it ends, before it is reaped."""
        return not self._writer.is_closing()

    @property
    def idle(self) -> bool:
        """No lane has a job."""
        return all(thread.job is None for thread in self._threads)

    def free(self, lane: int) -> bool:
        """Whether this lane has no job."""
        return self._threads[lane].job is None

    def send(self, job: TextJob) -> None:
        """Send a job to its lane, which must be free; a process that has just ended hands it back."""
        state = self._threads[job.lane]
        assert state.job is None
        state.job, state.wall_s, state.cpu_from = job, 0.0, None
        if not self.connected:
            return
        self._writer.write(encode_head(job.header | {"lane": job.lane}, len(job.payload)))
        self._writer.write(job.payload)
        if self._watch is None:
            self._check_later()

    async def run(self) -> ProcessEnd:
        """Set the results of jobs as they are answered, until the process has ended and is reaped."""
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
            status = await kill_and_reap(self._process)
        return ProcessEnd(self._reason(status), self._running(), self._over_limit, self._stuck)

    def _kill(self, over_limit: TextJob | None) -> None:
        """Kill the process because of a job over its CPU time; None: because it is stuck."""
        self._over_limit, self._stuck = over_limit, over_limit is None
        self._writer.transport.abort()  # which ends `run`

    def _answered(self, lane: int, header: Header, payload: bytes) -> None:
        """Give a job its answer, and free its lane."""
        state = self._threads[lane]
        job, state.job = state.job, None
        if "thread" in header:  # a new thread, of the original priority, serves this lane from now on
            state.id, state.is_lowered = header["thread"], False
        if job is not None and not job.future.done():
            job.future.set_result((header, payload))
        self._freed()

    def _running(self) -> list[TextJob]:
        return [thread.job for thread in self._threads if thread.job is not None]

    def _reason(self, status: int) -> str:
        memory = self._limits.memory_mib
        if self._stuck:
            return "the tokenizer does not answer"
        if self._over_limit is not None or status == -signal.SIGXCPU:
            return f"it takes more than {self._limits.cpu_s:g} s of CPU time"
        if status == EXIT_MEMORY:
            return f"it takes more than {memory} MiB of memory"
        return f"the tokenizer process ended with status {status}; it may take {memory} MiB of memory"

    # Watching

    def _check_later(self) -> None:
        """Have the process checked after WATCH_INTERVAL_S."""
        loop = asyncio.get_running_loop()
        self._checked_at = loop.time()
        self._watch = loop.call_later(WATCH_INTERVAL_S, self._check)

    def _check(self) -> None:
        """Kill the process if a job takes too much CPU time, or if it is stuck; else check again later."""
        self._watch = None
        elapsed = asyncio.get_running_loop().time() - self._checked_at
        elapsed = min(elapsed, MAX_TICKS * WATCH_INTERVAL_S)
        if self.idle:
            self._standstill.rests()
            return
        if self._standstill.look(elapsed):
            self._kill(over_limit=None)
            return
        for state in self._threads:
            if state.job is None:
                continue
            taken, is_working = state.progress(thread_state(self.pid, state.id))
            if taken > self._limits.cpu_s:
                self._kill(over_limit=state.job)
                return
            if taken > LONG_CPU_S and not state.is_lowered:
                state.is_lowered = True
                _lower_priority(state.id)
            if is_working:
                continue
            state.wall_s += elapsed
            if state.wall_s > self._limits.wall_s:
                self._kill(over_limit=None)
                return
        self._check_later()


def _lower_priority(thread: int) -> None:
    """Give a thread of this user the priority of large jobs."""
    with suppress(OSError):  # it may have ended
        niceness = max(LARGE_NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


async def _read(reader: asyncio.StreamReader) -> tuple[Header, bytes]:
    head, payload = frame_lengths(await reader.readexactly(PREFIX.size))
    return decode_header(await reader.readexactly(head)), await reader.readexactly(payload)
