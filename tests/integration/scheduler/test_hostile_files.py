"""A hostile tokenizer or template is refused, or fails the request that it is used for, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from paceline import Delta, aio, errors

from executor_service.backends.byte_tokenizer import byte_tokenizer
from tests.support.doctored_executor import doctored_executor, doctored_stack
from tests.support.stack import Stack, eventually, oracle_stack

pytestmark = pytest.mark.long

ENDLESS = (
    "{% if messages[0].content == 'loop' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ messages[0].content }}"
)
LIMITS = ("--tokenizer-memory-mib", "256", "--tokenizer-cpu-s", "1")


def bomb() -> str:
    """A tokenizer that doubles a letter of the text that it is tried with, time and again."""
    tokenizer = json.loads(byte_tokenizer().tokenizer_json)
    double = {"type": "Replace", "pattern": {"String": "q"}, "content": "qq"}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [double] * 40}
    return json.dumps(tokenizer)


def children(stack: Stack) -> list[int]:
    """The scheduler's processes."""
    pid = stack.scheduler.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def stat(pid: int) -> list[str]:
    """What /proc says of a process, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


async def test_an_executor_with_such_files_is_refused_by_name_and_another_one_serves(tmp_path: Path) -> None:
    with doctored_executor(tmp_path / "bad", tokenizer_json=bomb()) as bad:
        stack = Stack(tmp_path)
        try:
            good = stack.start_executor()
            stack.start_scheduler(*LIMITS, executors=[bad, good])
            stack.scheduler.wait_serving()
            async with stack.client() as client:
                assert await client.completions("hello", max_tokens=2)
        finally:
            stack.kill()
    with doctored_executor(tmp_path / "alone", tokenizer_json=bomb()) as bad:
        stack = Stack(tmp_path / "two")
        try:
            stack.start_scheduler(*LIMITS, executors=[bad])
            async with stack.client() as client:

                async def refused() -> bool:
                    (executor,) = await client.executors()
                    return "tokenizer can't be used" in executor.detail and not executor.connected

                await eventually(refused, "it is not refused")
            assert await asyncio.to_thread(stack.scheduler.terminate) == 0
        finally:
            stack.kill()


async def test_a_template_that_does_not_compile_costs_the_chats_and_no_text(tmp_path: Path) -> None:
    with doctored_stack(tmp_path, chat_template="{% for m in messages %}{{ m.content }}") as stack:
        async with stack.client() as client:
            info = await client.model_info()
            assert not info.has_chat_template
            assert "chat" not in info.capabilities
            assert await client.completions("hello", max_tokens=2)
            assert (await client.rerank("why?", ["a", "b"], method="likelihood")).results
            why = "chat template can't be used: the chat template does not compile"
            with pytest.raises(errors.Unsupported, match=f"messages: .*{why}"):
                await client.chat([{"role": "user", "content": "x"}], max_tokens=1)
            with pytest.raises(errors.Unsupported, match=rf"documents\[0\]: .*{why}"):
                await client.rerank("why?", ["a", "b"])
        assert stack.scheduler.log.count("chats are refused") == 1


async def test_an_endless_template_fails_its_request_and_harms_no_stream(tmp_path: Path) -> None:
    with doctored_stack(tmp_path, scheduler=LIMITS, chat_template=ENDLESS) as stack:
        async with stack.client() as client:
            stream = client.generate("hello", max_tokens=100, ignore_eos=True)
            first = await anext(stream)
            assert isinstance(first, Delta)
            with pytest.raises(errors.InvalidRequest, match=r"messages: .*more than 1 s of CPU time"):
                await client.chat([{"role": "user", "content": "loop"}], max_tokens=1)
            (completion,) = await stream.collect()
            assert len(completion.token_ids) == 100
            assert await client.chat([{"role": "user", "content": "x"}], max_tokens=1)


async def test_sigterm_ends_the_scheduler_and_its_tokenizers_in_the_middle_of_a_loop(tmp_path: Path) -> None:
    with doctored_stack(tmp_path, chat_template=ENDLESS) as stack:
        (child,) = children(stack)
        async with aio.Client(stack.scheduler.address, failover_timeout_s=0) as client:
            chat = asyncio.create_task(client.chat([{"role": "user", "content": "loop"}], max_tokens=1))

            async def working() -> bool:
                return int(stat(child)[11]) > 50  # in 10 ms

            await eventually(working, "it does not loop")
            assert await asyncio.to_thread(stack.scheduler.terminate) == 0
            await asyncio.gather(chat, return_exceptions=True)
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


async def test_tokenizers_end_with_a_scheduler_that_was_killed(tmp_path: Path) -> None:
    with oracle_stack(tmp_path) as stack:
        (child,) = children(stack)
        stack.scheduler.kill()

        async def gone() -> bool:
            try:
                return stat(child)[0] == "Z"  # a container without an init process does not reap it
            except FileNotFoundError:
                return True

        await eventually(gone, "it has not ended")
