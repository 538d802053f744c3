"""The tokenizer processes: a bounded queue of jobs for each lane, and a process replaced when it ends.

A job that is over its limits fails, and ends its process; the other job that ran there begins again. When a
process ends and nobody knows why, all that ran in it is suspect: suspects run alone, one by one, and what
was running at two ends fails. Jobs whose caller has left are not begun.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque

from paceline.service.logs import Log

from scheduler_service.model import TokenizerSource
from scheduler_service.text.errors import (
    PromptError,
    StuckError,
    TextError,
    UnusableTokenizerError,
)
from scheduler_service.text.frames import LANES, Header, unpack_ints
from scheduler_service.text.lane import Lane
from scheduler_service.text.process import End, Job, StartError, TextLimits, TextProcess
from scheduler_service.text.vocabulary import TokenBytes

log = Log(__name__)

SMALL_BYTES = 16 << 10
"""Of a job for the lane of small ones."""
MAX_JOBS = 512
"""That wait or run, in each lane; one caller may have half of them."""
MAX_BYTES = 32 << 20
"""Of them."""
MAX_TEMPLATE_CHARS = 1 << 20
"""Of a chat template and the tokens that it writes; templates in use have up to 20,000."""
MAX_PROCESSES = 4
MAX_DEATHS = 2
RESTART_S = 0.1  # doubles ...
RESTART_MAX_S = 5.0  # ... up to here, while processes end without having answered anything
SMALL, LARGE = range(LANES)


def process_count() -> int:
    """One on two cores, two on four, up to four."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_PROCESSES, cores // 2))


class TextPool:
    """Tokenizer processes. They exist while `run` does; `load` decides what they tokenize with."""

    def __init__(self, limits: TextLimits, processes: int | None = None) -> None:
        self._limits = limits
        self._slots = process_count() if processes is None else processes
        self._processes: list[TextProcess] = []
        self._lanes = [Lane(MAX_JOBS, MAX_BYTES) for _ in range(LANES)]
        self._suspects: deque[Job] = deque()
        self._candidate: Job | None = None  # files that were not loaded before, to be tried
        self._accepted: tuple[Header, bytes] | None = None  # files that were loaded once
        self._accepting = asyncio.Event()

    @property
    def pids(self) -> list[int]:
        """Of the processes that run now."""
        return [process.pid for process in self._processes]

    async def run(self) -> None:
        """Keep the processes there; ends only when cancelled, and they with it."""
        async with asyncio.TaskGroup() as group:
            for slot in range(self._slots):
                group.create_task(self._keep(slot), name=f"tokenizer {slot}")

    async def load(self, files: TokenizerSource) -> tuple[TokenBytes, bool]:
        """Tokenize with these files from now on. Returns their pieces, and whether messages can be prompts.

        Raises UnusableTokenizerError, and then nothing has changed. One call at a time, until one succeeds.
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
        return TokenBytes(payload[size:], unpack_ints(payload[:size]), answer["strip"]), answer["chat"]

    async def submit(self, header: Header, payload: bytes, caller: str = "") -> bytes:
        """The answer's payload. Raises PromptError, BusyError, StuckError."""
        job = self._job(header, payload, SMALL if len(payload) <= SMALL_BYTES else LARGE, caller)
        lane = self._lanes[job.lane]
        lane.enter(job)
        self._dispatch()
        try:
            answer, result = await job.future
        finally:
            lane.leave(job)
            if job in self._suspects:
                self._suspects.remove(job)
        if "error" in answer:
            raise PromptError(answer["error"], answer["field"])
        return result

    @staticmethod
    def _job(header: Header, payload: bytes, lane: int, caller: str = "") -> Job:
        return Job(header, payload, lane, asyncio.get_running_loop().create_future(), caller)

    def _dispatch(self) -> None:
        """Begin what can begin."""
        loaded = [process for process in self._processes if process.loaded]
        for process in self._processes:
            if not process.loaded and process.idle and self._candidate is not None:
                job, self._candidate = self._candidate, None
                self._send_load(process, job)
        for process in loaded:
            if process.alone:
                if not process.idle:
                    continue
                process.alone = False
            if self._suspects and process.idle:
                process.alone = True
                process.send(self._suspects.popleft())
            elif not self._suspects or process is not loaded[0]:  # which is kept free for suspects
                for number, lane in enumerate(self._lanes):
                    if lane and process.free(number):
                        process.send(lane.next())

    # Processes

    async def _keep(self, slot: int) -> None:
        """Keep one process there: the first from the start, the others once there is a tokenizer."""
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
                if await self._tend(process):
                    pause_s = RESTART_S
                    continue
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_MAX_S)

    async def _tend(self, process: TextProcess) -> bool:
        """Until it ends. Returns whether another one may be of use at once."""
        self._processes.append(process)
        if self._accepted is not None:
            self._send_load(process, self._job(*self._accepted, LARGE))
        self._dispatch()
        try:
            end = await process.run()
        finally:
            self._processes.remove(process)
        log.warning("tokenizer process ended", pid=process.pid, why=end.why)
        self._bury(end)
        return process.loaded or self._accepted is None

    def _send_load(self, process: TextProcess, job: Job) -> None:
        def answered(future: asyncio.Future[tuple[Header, bytes]]) -> None:
            if future.cancelled() or future.exception() is not None:
                return
            process.loaded = "error" not in future.result()[0]
            self._dispatch()

        process.send(job)
        job.future.add_done_callback(answered)

    def _bury(self, end: End) -> None:
        """What was running begins again, waits to run alone, or fails."""
        for job in end.running:
            job.deaths += end.culprit is None
            if job.future.done():
                continue
            if job is end.culprit or job.deaths >= MAX_DEATHS or job.header["op"] == "load":
                job.future.set_exception(StuckError(end.why) if end.stuck else PromptError(end.why))
            elif end.culprit is not None:
                self._lanes[job.lane].put_back(job)
            else:
                self._suspects.append(job)
        self._dispatch()
