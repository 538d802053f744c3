"""Prompts become token ids in other processes, which start, share the work and end with the scheduler."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from scheduler_service.text.errors import PromptError
from scheduler_service.text.frames import LANES, LARGE_NICENESS
from scheduler_service.text.items import PlainItem, TextItem, WholeItem
from scheduler_service.text.pool import process_count
from scheduler_service.text.process import TextProcess
from scheduler_service.text.worker.limits import NICENESS
from tests.unit.scheduler_shell import tokenizers_made_here as made
from tests.unit.scheduler_shell.text_processes import (
    ENDLESS,
    HELLO,
    Recorder,
    files,
    linux,
    running,
    stopped,
    tools,
    when,
)


async def test_prompts_become_ids_in_another_process() -> None:
    async with tools(files()) as (text, _):
        tokenizer = made.byte_level()
        assert list(await text.encode_text("hello <|end|>")) == tokenizer.encode("hello <|end|>").ids
        ids = await text.encode_messages(HELLO, 1000)
        assert await text.decode(ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


async def test_tokens_that_the_model_does_not_have_are_refused_by_the_field() -> None:
    """A tokenizer may know more of them; the executor would refuse the row, an error of the service."""
    (beyond,) = made.byte_level().encode("<think>").ids
    async with tools(files(), vocab_size=beyond) as (text, _):
        assert list(await text.encode_text("hello")) == made.byte_level().encode("hello").ids
        why = rf"^makes token {beyond}, but the model has {beyond} tokens"
        with pytest.raises(PromptError, match=why):
            await text.encode_text("hello <think>")
        with pytest.raises(PromptError, match=why) as error:
            await text.encode_messages([{"role": "user", "content": "<think>"}], 1000)
        assert error.value.field == "messages"
        items: list[TextItem] = [PlainItem("inputs[0].text", "hello"), WholeItem("inputs[1].text", "<think>")]
        with pytest.raises(PromptError, match=why) as error:
            await text.encode_items(items, 1000)
        assert error.value.field == "inputs[1].text"
        assert [list(ids) for ids in await text.encode_items(items[:1], 1000)] == [
            made.byte_level().encode("hello").ids
        ]


def test_the_scheduler_imports_neither_tokenizers_nor_templates() -> None:
    code = (
        "import sys, scheduler_service.server; "
        "print([name for name in ('tokenizers', 'jinja2') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_there_is_one_process_for_each_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {}
    for cores in (1, 2, 3, 4, 8, 64):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        counts[cores] = process_count()
    assert counts == {1: 1, 2: 1, 3: 1, 4: 2, 8: 4, 64: 4}


async def test_other_processes_start_once_there_is_a_tokenizer() -> None:
    async with running(processes=3) as pool:
        await pool.load(files())
        while len(pool.pids) < 3:  # noqa: ASYNC110  # processes take their time
            await asyncio.sleep(0.01)
        assert len(set(pool.pids)) == 3


async def test_a_small_prompt_does_not_wait_for_a_large_one() -> None:
    async with tools(files(when("x" * 20000, ENDLESS))) as (text, pool):
        large = asyncio.create_task(text.encode_messages([{"role": "user", "content": "x" * 20000}], 1 << 20))
        for content in ("a", "b"):
            assert await text.decode(await text.encode_messages([{"role": "user", "content": content}], 99))
        assert not large.done()  # it never ends
        assert len(pool.pids) == 1
        large.cancel()


async def test_a_cancelled_job_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    async with tools(files()) as (text, pool):
        go_on = stopped(pool)
        jobs = [asyncio.create_task(text.encode_text(letter)) for letter in "abc"]
        await recorder.count(1)
        jobs[1].cancel()
        await asyncio.gather(jobs[1], return_exceptions=True)
        go_on()
        await asyncio.gather(jobs[0], jobs[2])
    assert recorder.begun == [b"a", b"c"]


def thread_of(process: TextProcess, lane: int) -> int:
    return process._threads[lane].id


def niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


@linux
async def test_a_small_job_that_takes_long_gets_the_priority_of_large_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(monkeypatch)
    async with tools(files(when("slow", ENDLESS))) as (text, _):
        job = asyncio.create_task(text.encode_messages([{"role": "user", "content": "slow"}], 1000))
        await recorder.count(1)
        small, large = (thread_of(recorder.process, lane) for lane in range(LANES))
        while niceness(small) < niceness(large):  # noqa: ASYNC110  # it never ends
            await asyncio.sleep(0.01)
        job.cancel()
    assert LARGE_NICENESS > NICENESS


@linux
async def test_a_job_after_a_long_one_has_the_original_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    async with tools(files()) as (text, pool):
        await text.encode_text("a")
        process, pids = recorder.process, pool.pids
        first = thread_of(process, 0)
        before = niceness(first)
        lowered = max(before, LARGE_NICENESS)  # the process may have been started with as little priority
        os.setpriority(os.PRIO_PROCESS, first, lowered)  # as if it had taken long
        await text.encode_text("b")
        second = thread_of(process, 0)
        assert (second != first) == (lowered > before)
        assert niceness(second) == before
        await text.encode_text("c")
        assert (thread_of(process, 0), pool.pids) == (second, pids)


async def test_processes_end_with_the_scheduler_in_the_middle_of_a_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(monkeypatch)
    async with tools(files(when("slow", ENDLESS))) as (text, pool):
        job = asyncio.create_task(text.encode_messages([{"role": "user", "content": "slow"}], 1000))
        await recorder.count(1)
        assert pool.pids
    job.cancel()
