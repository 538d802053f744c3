"""Runs tokenizer processes for tests, on small tokenizers and templates that behave badly when told to."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from scheduler_service.model import TokenizerSource
from scheduler_service.text.job import TextJob, TextLimits
from scheduler_service.text.model_text import ModelText
from scheduler_service.text.pool import TextPool
from scheduler_service.text.process import TextProcess
from tests.support.processes import stop
from tests.unit.scheduler_shell import tokenizers_made_here as made
from tests.unit.scheduler_shell.test_chat_template import CHATML

LIMITS = TextLimits(memory_mib=512, cpu_s=60)
QUICK = replace(LIMITS, cpu_s=0.3)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HELLO = [{"role": "user", "content": "hello"}]
linux = pytest.mark.skipif(sys.platform != "linux", reason="CPU time of threads is read in /proc")


def files(template: str = CHATML, tokenizer: Tokenizer | None = None) -> TokenizerSource:
    json_ = (tokenizer or made.byte_level()).to_str()
    return TokenizerSource(json_.encode(), template, "", "", False)


def when(content: str, then: str) -> str:
    """A template that renders a message, and runs `then` first if the message is `content`."""
    return "{% if messages[0].content == '" + content + "' %}" + then + "{% endif %}{{ messages[0].content }}"


@asynccontextmanager
async def running(limits: TextLimits = LIMITS, processes: int = 1) -> AsyncIterator[TextPool]:
    pool = TextPool(limits, processes)
    task = asyncio.create_task(pool.run())
    try:
        async with asyncio.timeout(300):
            yield pool
    finally:
        pids = pool.pids
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


@asynccontextmanager
async def tools(
    given: TokenizerSource, limits: TextLimits = LIMITS, processes: int = 1, vocab_size: int = 1000
) -> AsyncIterator[tuple[ModelText, TextPool]]:
    async with running(limits, processes) as pool:
        made_of = await ModelText.made_of(given, pool, vocab_size)
        assert made_of is not None
        yield made_of, pool


class Recorder:
    """The payloads of the jobs that were sent to processes, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[bytes] = []
        self._process: TextProcess | None = None
        self._event = asyncio.Event()
        send = TextProcess.send

        def recorded(process: TextProcess, job: TextJob) -> None:
            if job.header["op"] != "load":
                self.begun.append(job.payload)
                self._process = process
                self._event.set()
            send(process, job)

        monkeypatch.setattr(TextProcess, "send", recorded)

    async def count(self, count: int) -> None:
        """Wait until this many jobs were sent."""
        while len(self.begun) < count:
            self._event.clear()
            await self._event.wait()

    @property
    def process(self) -> TextProcess:
        """The process of the last job."""
        assert self._process is not None
        return self._process

    def time_is_up(self) -> None:
        """Pretend that the jobs in the last job's process have used up their wall time."""
        for lane in self.process._threads:
            lane.wall_s = LIMITS.wall_s


def stopped(pool: TextPool) -> Callable[[], None]:
    """Stop the only process; returns a function that continues it."""
    (pid,) = pool.pids
    stop(pid)
    return lambda: os.kill(pid, signal.SIGCONT)
