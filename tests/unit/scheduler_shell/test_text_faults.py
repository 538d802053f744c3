"""A tokenizer process that is stopped, stuck or killed is replaced, and its jobs are done by the next one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from service_kit.process import new_event_loop

from scheduler_service.text import launch
from scheduler_service.text import process as process_module
from scheduler_service.text.errors import PromptError, StuckError
from scheduler_service.text.job import TextJob
from scheduler_service.text.pool import SMALL_BYTES
from scheduler_service.text.process import TextProcess
from tests.unit.scheduler_shell.text_processes import (
    ENDLESS,
    QUICK,
    Recorder,
    files,
    linux,
    stopped,
    tools,
    when,
)


async def test_time_in_which_a_process_is_stopped_is_no_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    look = TextProcess._check

    def counted(process: TextProcess) -> None:
        nonlocal looks
        looks += 1
        look(process)

    monkeypatch.setattr(TextProcess, "_check", counted)
    monkeypatch.setattr("scheduler_service.text.process.WATCH_INTERVAL_S", 0.001)
    async with tools(files(), replace(QUICK, cpu_s=0.05)) as (text, pool):
        pids = pool.pids
        go_on = stopped(pool)
        job = asyncio.create_task(text.encode_text("hello"))
        while looks < 50:
            assert not job.done(), "a stopped process has answered"
            await asyncio.sleep(0.001)
        go_on()
        assert await text.decode(await job) == "hello"
        assert pool.pids == pids


async def test_a_process_that_is_killed_while_it_loads_a_model_costs_it_no_chats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send, killed = TextProcess.send, list[int]()

    def sent(process: TextProcess, job: TextJob) -> None:
        send(process, job)
        if job.header["op"] == "load" and not killed:
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)

    monkeypatch.setattr(TextProcess, "send", sent)
    async with tools(files()) as (text, _):
        assert text.has_chat_template
        assert await text.decode(await text.encode_text("hello")) == "hello"
    assert killed


async def test_a_stuck_process_is_replaced_and_its_job_is_done_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(monkeypatch)
    async with tools(files()) as (text, pool):
        before = pool.pids
        stopped(pool)
        job = asyncio.create_task(text.encode_text("hello"))
        await recorder.count(1)
        recorder.time_is_up()
        assert await text.decode(await job) == "hello"
        assert pool.pids != before


@linux
async def test_a_stopped_process_is_replaced_before_its_wall_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service_kit.standstill.MAX_STILL_S", 0.0)
    async with tools(files()) as (text, pool):
        before = pool.pids
        stopped(pool)
        assert await text.decode(await text.encode_text("hello")) == "hello"
        assert pool.pids != before


async def test_the_event_loop_never_waits_for_the_end_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_in = set()

    def recorded(wait: Callable[..., int | None]) -> Callable[..., int | None]:
        def waiting(process: subprocess.Popen[bytes], *arguments: float) -> int | None:
            waited_in.add(threading.get_ident())
            return wait(process, *arguments)

        return waiting

    for name in ("poll", "wait"):
        monkeypatch.setattr(subprocess.Popen, name, recorded(getattr(subprocess.Popen, name)))
    async with tools(files(when("slow", ENDLESS)), QUICK) as (text, pool):
        with pytest.raises(PromptError):  # over its limit: killed
            await text.encode_messages([{"role": "user", "content": "slow"}], 1000)
        assert await text.encode_text("a")
        os.kill(pool.pids[0], signal.SIGKILL)  # ends by itself
        assert await text.encode_text("b")
    assert waited_in
    assert threading.get_ident() not in waited_in


def test_a_prompt_that_comes_while_a_dead_process_is_reaped_is_done_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kill_and_reap = launch.kill_and_reap

    async def scenario() -> None:
        reaping, reap = asyncio.Event(), asyncio.Event()

        async def slowly(process: subprocess.Popen[bytes]) -> int:
            reaping.set()
            await reap.wait()
            return await kill_and_reap(process)

        async with tools(files()) as (text, pool):
            monkeypatch.setattr(process_module, "kill_and_reap", slowly)
            os.kill(pool.pids[0], signal.SIGKILL)
            await reaping.wait()
            prompts = [asyncio.create_task(text.encode_text("a" * n)) for n in (1, SMALL_BYTES + 1)]
            await asyncio.sleep(0)  # they are submitted
            reap.set()
            assert [len(ids) for ids in await asyncio.gather(*prompts)] == [1, SMALL_BYTES + 1]

    with asyncio.Runner(
        loop_factory=new_event_loop
    ) as runner:  # the service's: uvloop's closed streams raise
        runner.run(scenario())


async def test_a_tokenizer_that_never_answers_is_no_error_of_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(monkeypatch)
    async with tools(files(when("slow", ENDLESS))) as (text, pool):
        job = asyncio.create_task(text.encode_messages([{"role": "user", "content": "slow"}], 1000))
        for count in (1, 2):
            await recorder.count(count)
            stopped(pool)
            recorder.time_is_up()
        with pytest.raises(StuckError):
            await job


async def test_jobs_of_a_process_that_was_killed_are_done_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(monkeypatch)
    async with tools(files()) as (text, pool):
        stopped(pool)
        jobs = [asyncio.create_task(text.encode_text(letter)) for letter in "abc"]
        jobs.append(asyncio.create_task(text.encode_text("x" * 20_000)))
        await recorder.count(2)
        os.kill(pool.pids[0], signal.SIGKILL)
        assert [len(ids) for ids in await asyncio.gather(*jobs)] == [1, 1, 1, 20_000]
    # The running jobs are isolated: run again one after the other, before the queued ones.
    assert recorder.begun == [b"a", b"x" * 20_000, b"a", b"x" * 20_000, b"b", b"c"]
