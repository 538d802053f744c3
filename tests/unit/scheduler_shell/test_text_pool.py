"""Tokenizer processes: bounded, killed at their limits, replaced, and no prompt pays for another's."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from paceline.service.process import new_event_loop
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from scheduler_service.model import TokenizerSource
from scheduler_service.text import launch
from scheduler_service.text import pool as pools
from scheduler_service.text import process as process_module
from scheduler_service.text.errors import BusyError, PromptError, StuckError, UnusableTokenizerError
from scheduler_service.text.frames import LANES, LARGE_NICENESS
from scheduler_service.text.job import TextJob, TextLimits
from scheduler_service.text.pool import SMALL_BYTES, TextPool, process_count
from scheduler_service.text.process import TextProcess
from scheduler_service.text.tools import TextTools
from scheduler_service.text.worker.limits import NICENESS
from tests.unit.scheduler_shell import ailing_worker
from tests.unit.scheduler_shell import tokenizers_made_here as made
from tests.unit.scheduler_shell.test_chat_template import CHATML

LIMITS = TextLimits(memory_mib=512, cpu_s=60)
QUICK = replace(LIMITS, cpu_s=0.3)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = (
    "{% set ns = namespace(text='x' * 1000000) %}"
    "{% for i in range(30) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}"
)
HELLO = [{"role": "user", "content": "hello"}]
linux = pytest.mark.skipif(sys.platform != "linux", reason="CPU time of threads is read in /proc")


def files(template: str = CHATML, tokenizer: Tokenizer | None = None) -> TokenizerSource:
    json_ = (tokenizer or made.byte_level()).to_str()
    return TokenizerSource(json_.encode(), template, "", "", False)


def when(content: str, then: str) -> str:
    """A template that behaves badly at one message only."""
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
    given: TokenizerSource, limits: TextLimits = LIMITS, processes: int = 1
) -> AsyncIterator[tuple[TextTools, TextPool]]:
    async with running(limits, processes) as pool:
        made_of = await TextTools.made_of(given, pool)
        assert made_of is not None
        yield made_of, pool


class Recorder:
    """Which jobs began, in order, in whatever process."""

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
        """Wait until so many have begun."""
        while len(self.begun) < count:
            self._event.clear()
            await self._event.wait()

    @property
    def process(self) -> TextProcess:
        """Of the last job."""
        assert self._process is not None
        return self._process

    def time_is_up(self) -> None:
        """All that runs in the last job's process has used up its wall time."""
        for lane in self.process._threads:
            lane.wall_s = LIMITS.wall_s


def stopped(pool: TextPool) -> Callable[[], None]:
    """Stop the only process; returns how to let it go on."""
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


async def test_prompts_become_ids_in_another_process() -> None:
    async with tools(files()) as (text, _):
        tokenizer = made.byte_level()
        assert list(await text.encode_text("hello <|end|>")) == tokenizer.encode("hello <|end|>").ids
        ids = await text.encode_messages(HELLO, 1000)
        assert await text.decode(ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_the_scheduler_imports_neither_tokenizers_nor_templates() -> None:
    code = (
        "import sys, scheduler_service.server; "
        "print([name for name in ('tokenizers', 'jinja2') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_one_process_on_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_queued_text_is_bounded_in_jobs_and_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MAX_JOBS", 4)  # one caller may have half
    monkeypatch.setattr(pools, "MAX_BYTES", 100_000)
    async with tools(files()) as (text, pool):
        go_on = stopped(pool)
        jobs = [asyncio.create_task(text.encode_text(letter)) for letter in "ab"]
        large = asyncio.create_task(text.encode_text("x" * 40_000))
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await text.encode_text("c")
        with pytest.raises(BusyError):
            await text.encode_text("x" * 20_000)
        go_on()
        await asyncio.gather(*jobs, large)
        assert len(await text.encode_text("c")) == 1


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


@linux
async def test_a_prompt_over_its_cpu_time_fails_and_the_other_job_of_its_process_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(monkeypatch)
    async with tools(files(when("slow", ENDLESS)), QUICK) as (text, pool):
        before = pool.pids
        slow = asyncio.create_task(text.encode_messages([{"role": "user", "content": "slow"}], 1000))
        await recorder.count(1)
        waiting = asyncio.create_task(text.encode_text("hello"))
        with pytest.raises(PromptError, match=r"more than 0\.3 s of CPU time"):
            await slow
        assert await text.decode(await waiting) == "hello"
        assert pool.pids != before
    assert recorder.begun[-1] == b"hello"


@linux
async def test_a_job_does_not_fail_with_another_jobs_process(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    big = "1" * 400_000
    async with tools(files(when("slow", ENDLESS)), QUICK) as (text, _):
        slow = asyncio.create_task(text.encode_messages([{"role": "user", "content": "slow"}], 1000))
        other = asyncio.create_task(text.encode_text(big[:20_000]))
        await recorder.count(2)
        with pytest.raises(PromptError):
            await slow
        assert len(await other) == 20_000


async def test_time_in_which_the_process_stands_still_is_no_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
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
        while looks < 50:  # noqa: ASYNC110  # a timer's business
            await asyncio.sleep(0.001)
        go_on()
        assert await text.decode(await job) == "hello"
        assert pool.pids == pids


async def test_a_process_that_stands_still_for_good_is_replaced_and_its_job_done_by_the_next(
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
async def test_a_process_that_was_stopped_is_given_up_long_before_a_slow_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scheduler_service.text.process.MAX_STOPPED_S", 0.0)
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


async def test_a_tokenizer_that_never_answers_is_not_the_prompts_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(monkeypatch)
    async with tools(files(when("slow", ENDLESS))) as (text, _):
        job = asyncio.create_task(text.encode_messages([{"role": "user", "content": "slow"}], 1000))
        for count in (1, 2):
            await recorder.count(count)
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
    # What was running is suspect: alone, one after the other, and before all that waited.
    assert recorder.begun == [b"a", b"x" * 20_000, b"a", b"x" * 20_000, b"b", b"c"]


async def test_a_job_at_which_two_processes_died_fails_and_only_that() -> None:
    async with tools(files(when("big", DOUBLES)), replace(LIMITS, memory_mib=256)) as (text, _):
        jobs = [
            asyncio.create_task(text.encode_messages([{"role": "user", "content": "big"}], 1 << 20)),
            asyncio.create_task(text.encode_text("x" * 20_000)),
            asyncio.create_task(text.encode_text("hello")),
        ]
        results = await asyncio.gather(*jobs, return_exceptions=True)
    assert isinstance(results[0], PromptError)
    assert "256 MiB" in str(results[0])
    assert [len(result) for result in results[1:]] == [20_000, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize("ailment", [ailing_worker.ANSWER, ailing_worker.THREAD])
async def test_an_answer_for_which_there_is_no_memory_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, ailment: str
) -> None:
    monkeypatch.setattr("scheduler_service.text.launch.WORKER", ailing_worker.__name__)
    async with tools(files()) as (text, _):
        with pytest.raises(PromptError, match="512 MiB of memory"):
            await text.encode_text(ailment)
        assert await text.decode(await text.encode_text("hello")) == "hello"


async def test_a_prompt_of_too_many_tokens_is_refused_where_it_is_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scheduler_service.text.launch.WORKER", ailing_worker.__name__)
    async with tools(files()) as (text, pool):
        pids = pool.pids
        assert len(await text.encode_text("1" * ailing_worker.MAX_IDS)) == ailing_worker.MAX_IDS
        with pytest.raises(PromptError, match="has more than 100 tokens"):
            await text.encode_text("1" * (ailing_worker.MAX_IDS + 1))
        assert pool.pids == pids


async def test_a_template_that_complains_in_no_valid_unicode_is_heard() -> None:
    complains = r"""{{ raise_exception("no \ud800 here") }}"""
    async with tools(files(when("bad", complains))) as (text, pool):
        pids = pool.pids
        with pytest.raises(PromptError, match=r"no \? here"):
            await text.encode_messages([{"role": "user", "content": "bad"}], 1000)
        assert pool.pids == pids


async def test_a_template_that_writes_without_end_is_stopped_while_it_writes() -> None:
    writes = "{% for a in range(99999) %}{% for b in range(99999) %}0123456789{% endfor %}{% endfor %}"
    async with tools(files(when("long", writes))) as (text, pool):
        pids = pool.pids
        with pytest.raises(PromptError, match="more than 1000 bytes"):
            await text.encode_messages([{"role": "user", "content": "long"}], 1000)
        assert pool.pids == pids


BOMB = Tokenizer.from_str(made.byte_level().to_str())
BOMB.normalizer = normalizers.Sequence([normalizers.Replace("z", "zz")] * 40)
SLOW = Tokenizer.from_str(made.byte_level().to_str())
SLOW.pre_tokenizer = pre_tokenizers.Split(Regex("a*a*a*b"), "isolated")
SLOW_TEXT = "a" * 330 + "xb"
NEEDS_TRIAL = Tokenizer.from_str(made.byte_level().to_str())
NEEDS_TRIAL.normalizer = normalizers.Sequence([normalizers.Replace("q", "qq")] * 40)


async def test_a_normalizer_that_doubles_strings_costs_the_prompt_that_meets_it() -> None:
    async with tools(files(tokenizer=BOMB), replace(LIMITS, memory_mib=256)) as (text, _):
        with pytest.raises(PromptError, match="256 MiB"):
            await text.encode_text("z")
        assert await text.decode(await text.encode_text("hello")) == "hello"


@linux
async def test_a_pattern_that_backtracks_without_end_costs_the_prompt_that_meets_it() -> None:
    async with tools(files(tokenizer=SLOW), QUICK) as (text, _):
        with pytest.raises(PromptError, match="CPU time"):
            await text.encode_text(SLOW_TEXT)
        assert await text.decode(await text.encode_text("hello")) == "hello"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (files("{% if %}"), "does not compile"),
        (files("x" * (pools.MAX_TEMPLATE_CHARS + 1)), "more than 1048576 characters"),
        (replace(files(), tokenizer_json=b"{}"), "Tokenizer"),
        (replace(files(), tokenizer_json=b"\xff" * 1000), "the tokenizer failed"),
        (files(tokenizer=NEEDS_TRIAL), "256 MiB"),
    ],
)
async def test_unusable_files_are_refused_with_the_reason(given: TokenizerSource, why: str) -> None:
    async with running(replace(LIMITS, memory_mib=256)) as pool:
        with pytest.raises(UnusableTokenizerError, match=why):
            await pool.load(given)
        await pool.load(files())  # the next one's are as good as ever
        assert await pool.submit({"op": "text"}, b"hello")


@linux
async def test_files_that_take_too_long_to_load_are_refused() -> None:
    tokenizer = Tokenizer.from_str(SLOW.to_str())
    tokenizer.normalizer = normalizers.Replace("q", SLOW_TEXT)  # which the trial text has
    async with running(QUICK) as pool:
        with pytest.raises(UnusableTokenizerError, match="CPU time"):
            await pool.load(files(tokenizer=tokenizer))


def thread_of(process: TextProcess, lane: int) -> int:
    return process._threads[lane].id


def niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


@linux
async def test_a_small_job_that_takes_long_is_ranked_with_the_large_ones(
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
async def test_a_job_behind_a_long_one_is_ranked_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    async with tools(files()) as (text, pool):
        await text.encode_text("a")
        process, pids = recorder.process, pool.pids
        first = thread_of(process, 0)
        before = niceness(first)
        os.setpriority(os.PRIO_PROCESS, first, LARGE_NICENESS)  # as if it had taken long
        await text.encode_text("b")
        second = thread_of(process, 0)
        assert second != first
        assert niceness(second) == before
        await text.encode_text("c")
        assert (thread_of(process, 0), pool.pids) == (second, pids)


async def test_processes_end_with_the_scheduler_whatever_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    async with tools(files(when("slow", ENDLESS))) as (text, pool):
        job = asyncio.create_task(text.encode_messages([{"role": "user", "content": "slow"}], 1000))
        await recorder.count(1)
        assert pool.pids
    job.cancel()
