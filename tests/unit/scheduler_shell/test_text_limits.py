"""Limits of CPU time, memory and bytes: a prompt or file beyond one is refused, and costs no other prompt."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from scheduler_service.model import TokenizerSource
from scheduler_service.text import pool as pools
from scheduler_service.text.errors import BusyError, ChatTemplateUnusable, PromptError, UnusableTokenizerError
from scheduler_service.text.items import ChatItem, PlainItem
from tests.unit.scheduler_shell import ailing_worker
from tests.unit.scheduler_shell import tokenizers_made_here as made
from tests.unit.scheduler_shell.text_processes import (
    ENDLESS,
    HELLO,
    LIMITS,
    QUICK,
    Recorder,
    files,
    linux,
    running,
    stopped,
    tools,
    when,
)

pytestmark = pytest.mark.long

DOUBLES = (
    "{% set ns = namespace(text='x' * 1000000) %}"
    "{% for i in range(30) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}"
)
BOMB = Tokenizer.from_str(made.byte_level().to_str())
BOMB.normalizer = normalizers.Sequence([normalizers.Replace("z", "zz")] * 40)
SLOW = Tokenizer.from_str(made.byte_level().to_str())
SLOW.pre_tokenizer = pre_tokenizers.Split(Regex("a*a*a*b"), "isolated")
SLOW_TEXT = "a" * 330 + "xb"
NEEDS_TRIAL = Tokenizer.from_str(made.byte_level().to_str())
NEEDS_TRIAL.normalizer = normalizers.Sequence([normalizers.Replace("q", "qq")] * 40)


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
async def test_a_job_that_works_is_not_stuck_however_little_the_machine_lets_it_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(monkeypatch)
    async with tools(files(when("slow", ENDLESS)), QUICK) as (text, _):
        slow = asyncio.create_task(text.encode_messages([{"role": "user", "content": "slow"}], 1000))
        await recorder.count(1)
        recorder.time_is_up()
        with pytest.raises(PromptError, match="CPU time"):
            await slow
    assert len(recorder.begun) == 1


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


async def test_a_job_that_two_processes_died_at_fails_and_no_other_does() -> None:
    async with tools(files(when("big", DOUBLES)), replace(LIMITS, memory_mib=96)) as (text, _):
        jobs = [
            asyncio.create_task(text.encode_messages([{"role": "user", "content": "big"}], 1 << 20)),
            asyncio.create_task(text.encode_text("x" * 20_000)),
            asyncio.create_task(text.encode_text("hello")),
        ]
        results = await asyncio.gather(*jobs, return_exceptions=True)
    assert isinstance(results[0], PromptError)
    assert "96 MiB" in str(results[0])
    assert [len(result) for result in results[1:]] == [20_000, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize("ailment", [ailing_worker.ANSWER, ailing_worker.THREAD])
async def test_a_prompt_whose_answer_exceeds_the_memory_is_refused(
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


async def test_a_template_error_in_invalid_unicode_is_reported() -> None:
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


async def test_a_normalizer_that_doubles_strings_fails_only_its_prompt() -> None:
    async with tools(files(tokenizer=BOMB), replace(LIMITS, memory_mib=96)) as (text, _):
        with pytest.raises(PromptError, match="96 MiB"):
            await text.encode_text("z")
        assert await text.decode(await text.encode_text("hello")) == "hello"


@linux
async def test_a_pattern_that_backtracks_without_end_fails_only_its_prompt() -> None:
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
        (files(tokenizer=NEEDS_TRIAL), "96 MiB"),
    ],
)
async def test_unusable_files_are_refused_with_the_reason(given: TokenizerSource, why: str) -> None:
    async with running(replace(LIMITS, memory_mib=96)) as pool:
        with pytest.raises(UnusableTokenizerError, match=why):
            await pool.load(given)
        await pool.load(files())  # other files can be loaded afterwards
        assert await pool.submit({"op": "text", "begins": True}, b"hello")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% if %}", "does not compile"),
        ("{% generation %}never closed", "does not compile"),
        ("x" * (pools.MAX_TEMPLATE_CHARS + 1), "more than 1048576 characters"),
        ("{{" + 5000 * "(" + "1" + 5000 * ")" + "}}", "RecursionError"),
    ],
)
async def test_a_template_that_cannot_be_used_costs_chats_and_no_texts(template: str, why: str) -> None:
    async with tools(files(template)) as (text, _):
        assert not text.has_chat_template
        assert await text.decode(await text.encode_text("hello")) == "hello"
        with pytest.raises(ChatTemplateUnusable, match=why) as refused:
            await text.encode_messages(HELLO, 1000)
        assert refused.value.field == "messages"
        with pytest.raises(ChatTemplateUnusable, match=why) as refused:
            await text.encode_items([PlainItem("a", "a"), ChatItem("b", HELLO)], 1000)
        assert refused.value.field == "b"


@linux
async def test_files_that_take_too_long_to_load_are_refused() -> None:
    tokenizer = Tokenizer.from_str(SLOW.to_str())
    tokenizer.normalizer = normalizers.Replace("q", SLOW_TEXT)  # which the trial text has
    async with running(QUICK) as pool:
        with pytest.raises(UnusableTokenizerError, match="CPU time"):
            await pool.load(files(tokenizer=tokenizer))
