"""The tokenizer processes: a bounded queue of jobs for each lane, and a process replaced when it ends.

A job that exceeds its CPU time fails, and its process is killed; the other job of that process runs again.
When a process ends for an unknown reason, each job that it was running is isolated: run again with no other
job in the process. A job that was running at MAX_CRASHES such ends fails. Cancelled jobs are not started.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service_kit.logs import Log

from scheduler_service.model import TokenizerSource
from scheduler_service.text.errors import (
    PromptError,
    StuckError,
    TextError,
    UnusableTokenizerError,
)
from scheduler_service.text.frames import LANES, Header, unpack_ints
from scheduler_service.text.job import ProcessEnd, TextJob, TextLimits
from scheduler_service.text.lane_queue import LaneQueue
from scheduler_service.text.process import StartError, TextProcess
from scheduler_service.text.vocabulary import TokenBytes

log = Log(__name__)

SMALL_BYTES = 16 << 10
"""Largest payload of a job in the lane of small jobs."""
MAX_JOBS = 512
"""Queued and running jobs of a lane; one caller may have half of them."""
MAX_BYTES = 32 << 20
"""Payload bytes of the queued and running jobs of a lane; one caller may have half of them."""
MAX_TEMPLATE_CHARS = 1 << 20
"""Characters of a chat template with its BOS and EOS tokens; published templates have up to 20,000."""
MAX_PROCESSES = 4
MAX_CRASHES = 2
RESTART_S = 0.1
"""Pause after a process that did not start, or ended without having loaded the accepted tokenizer.

It doubles up to RESTART_MAX_S. Any other process that has ended is replaced at once.
"""
RESTART_MAX_S = 5.0
SMALL, LARGE = range(LANES)


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """What a tokenizer process says of the files that it has loaded."""

    pieces: TokenBytes
    has_chat_template: bool
    added: Mapping[str, int]
    """The ids of the markers that are added tokens, by text."""


def process_count() -> int:
    """Half of the CPU cores that this process may use, at least 1 and at most MAX_PROCESSES."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_PROCESSES, cores // 2))


class TextPool:
    """Tokenizer processes, running while `run` is. `load` sets their tokenizer, `submit` sends prompts."""

    def __init__(self, limits: TextLimits, processes: int | None = None) -> None:
        self._limits = limits
        self._slots = process_count() if processes is None else processes
        self._processes: list[TextProcess] = []
        self._queues = [LaneQueue(MAX_JOBS, MAX_BYTES) for _ in range(LANES)]
        self._isolated: deque[TextJob] = deque()
        self._candidate: TextJob | None = None  # a load job of new files, not sent yet
        self._accepted: tuple[Header, bytes] | None = None  # files that a process has loaded
        self._accepting = asyncio.Event()

    @property
    def pids(self) -> list[int]:
        """Process ids of the running processes."""
        return [process.pid for process in self._processes]

    async def run(self) -> None:
        """Keep the processes running; ends only when cancelled, and ends them."""
        async with asyncio.TaskGroup() as group:
            for slot in range(self._slots):
                group.create_task(self._keep_running(slot), name=f"tokenizer {slot}")

    async def load(self, files: TokenizerSource, markers: Sequence[str] = ()) -> LoadedTokenizer:
        """Tokenize with these files from now on. `markers`: texts that may be added tokens.

        Raises UnusableTokenizerError, and then nothing has changed. Calls must not overlap, and no call may
        follow one that has succeeded.
        """
        size = sum(map(len, (files.chat_template, files.bos_token, files.eos_token)))
        if size > MAX_TEMPLATE_CHARS:
            raise UnusableTokenizerError(f"the chat template has more than {MAX_TEMPLATE_CHARS} characters")
        header: Header = {
            "op": "load",
            "chat_template": files.chat_template,
            "bos_token": files.bos_token,
            "eos_token": files.eos_token,
            "add_bos": files.add_bos,
            "markers": list(markers),
        }
        job = self._candidate = self._job(header, files.tokenizer_json, LARGE)
        self._dispatch()
        try:
            answer, payload = await job.future
        except TextError as error:
            raise UnusableTokenizerError(str(error)) from error
        finally:
            self._candidate = None
        if "error" in answer:
            raise UnusableTokenizerError(answer["error"])
        self._accepted = header, files.tokenizer_json
        self._accepting.set()
        size = 4 * answer["count"]
        lengths, special = unpack_ints(payload[:size]), dict(answer["special"])
        pieces = TokenBytes(payload[size:], lengths, answer["strip"], special)
        return LoadedTokenizer(pieces, answer["chat"], answer["added"])

    async def submit(self, header: Header, payload: bytes, caller: str = "") -> bytes:
        """Run a job; returns the answer's payload. Raises PromptError, BusyError, StuckError."""
        job = self._job(header, payload, SMALL if len(payload) <= SMALL_BYTES else LARGE, caller)
        lane = self._queues[job.lane]
        lane.enter(job)
        self._dispatch()
        try:
            answer, result = await job.future
        finally:
            lane.leave(job)
            if job in self._isolated:
                self._isolated.remove(job)
        if "error" in answer:
            raise PromptError(answer["error"], answer["field"])
        return result

    @staticmethod
    def _job(header: Header, payload: bytes, lane: int, caller: str = "") -> TextJob:
        return TextJob(header, payload, lane, asyncio.get_running_loop().create_future(), caller)

    def _dispatch(self) -> None:
        """Send jobs to the lanes that are free: a load first, isolated jobs next, then the queued ones."""
        connected = [process for process in self._processes if process.connected]
        loaded = [process for process in connected if process.loaded]
        for process in connected:
            if not process.loaded and process.idle and self._candidate is not None:
                job, self._candidate = self._candidate, None
                self._send_load(process, job)
        for process in loaded:
            if process.exclusive:
                if not process.idle:
                    continue
                process.exclusive = False
            if self._isolated and process.idle:
                process.exclusive = True
                process.send(self._isolated.popleft())
            elif not self._isolated or process is not loaded[0]:  # the first is kept free for isolated jobs
                for number, lane in enumerate(self._queues):
                    if lane and process.free(number):
                        process.send(lane.next())

    # Processes

    async def _keep_running(self, slot: int) -> None:
        """Keep one process running: slot 0 from the start, the others once a tokenizer was loaded."""
        if slot:
            await self._accepting.wait()
        pause_s = RESTART_S
        while True:
            try:
                process = await TextProcess.start(self._limits, self._dispatch)
            except (StartError, OSError) as error:
                log.error("tokenizer process", error)
                if self._candidate is not None and not self._candidate.future.done():
                    self._candidate.future.set_exception(PromptError(str(error)))
            else:
                if await self._use(process):
                    pause_s = RESTART_S
                    continue
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_MAX_S)

    async def _use(self, process: TextProcess) -> bool:
        """Give a process jobs until it ends. Returns whether to replace it at once, without a pause."""
        self._processes.append(process)
        if self._accepted is not None:
            self._send_load(process, self._job(*self._accepted, LARGE))
        self._dispatch()
        try:
            end = await process.run()
        finally:
            self._processes.remove(process)
        log.warning("tokenizer process ended", pid=process.pid, why=end.why)
        self._resolve_running(end)
        return process.loaded or self._accepted is None

    def _send_load(self, process: TextProcess, job: TextJob) -> None:
        def answered(future: asyncio.Future[tuple[Header, bytes]]) -> None:
            if future.cancelled() or future.exception() is not None:
                return
            process.loaded = "error" not in future.result()[0]
            self._dispatch()

        process.send(job)
        job.future.add_done_callback(answered)

    def _resolve_running(self, end: ProcessEnd) -> None:
        """Decide for each job of an ended process: run it again, isolate it, or fail it."""
        for job in end.running:
            job.crashes += end.over_limit is None
            if job.future.done():
                continue
            if job is end.over_limit or job.crashes >= MAX_CRASHES or job.header["op"] == "load":
                job.future.set_exception(StuckError(end.why) if end.stuck else PromptError(end.why))
            elif end.over_limit is not None:
                self._queues[job.lane].put_back(job)
            else:
                self._isolated.append(job)
        self._dispatch()
