"""Speculation changes no token, with each drafter and with each fault of a draft executor; on the oracle."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from paceline import aio, errors
from paceline.types import Delta, Drafter, Speculation

from tests.support.ports import kept_port
from tests.support.stack import HEAL_S, Stack, eventually, ids_of, oracle_stack

pytestmark = pytest.mark.long

STREAMS, TOKENS = 4, 60
EXECUTOR = ["--step-ms", "4"]
DRAFT = ["--draft-agreement", "0.8", "--step-ms", "0.5"]
FEW = dict.fromkeys(range(6, 257), -1000.0)
"""Only six tokens are left, so that an oracle repeats itself and n-grams find something."""


def options(seed: int) -> dict[str, object]:
    """Every way of sampling takes part."""
    more: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "frequency_penalty": 0.5, "min_tokens": 20, "stop_token_ids": [3]},
        {"temperature": 0.0, "logit_bias": FEW},
    ]
    return {"max_tokens": TOKENS, "seed": seed, "ignore_eos": True, **more[seed % len(more)]}


def generation(client: aio.Client, seed: int, speculation: Speculation | str | int) -> aio.Generation:
    return client.generate(f"Prompt number {seed}", speculation=speculation, **options(seed))  # type: ignore[arg-type]


async def tokens(client: aio.Client, speculation: Speculation | str | int) -> list[list[int]]:
    runs = [generation(client, seed, speculation).collect() for seed in range(STREAMS)]
    return [ids_of(completions[0]) for completions in await asyncio.gather(*runs)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One stack for all that leave it as they found it."""
    with oracle_stack(tmp_path_factory.mktemp("shared"), executor=EXECUTOR, draft=DRAFT) as stack:
        yield stack


async def drafting(client: aio.Client) -> bool:
    return any(one.draft and one.connected for one in (await client.executors()))


async def test_the_tokens_are_those_of_plain_decoding_and_the_counters_add_up(shared: Stack) -> None:
    async with shared.client() as client:
        await eventually(lambda: drafting(client), "the draft executor is not taken")
        before = await client.status()
        plain = await tokens(client, "off")
        assert (await client.status()).drafted_tokens == before.drafted_tokens
        for speculation in ("auto", 8, Speculation(4, Drafter.NGRAM), Speculation(3, Drafter.DRAFT_EXECUTOR)):
            before = await client.status()
            assert await tokens(client, speculation) == plain, speculation
            after = await client.status()
            accepted = after.accepted_tokens - before.accepted_tokens
            drafted = after.drafted_tokens - before.drafted_tokens
            assert accepted <= drafted, speculation
            # Whether "auto" drafts depends on what steps take on this machine.
            assert speculation == "auto" or 0 < accepted < drafted, speculation
        assert after.failed == 0
    for address in shared.addresses:
        await shared.all_pages_back(address)


async def test_usage_says_what_was_drafted_and_accepted_by_position(shared: Stack) -> None:
    async with shared.client() as client:
        await eventually(lambda: drafting(client), "the draft executor is not taken")
        mode = Speculation(3, Drafter.DRAFT_EXECUTOR)
        (completion,) = await client.completions("text", max_tokens=120, temperature=0, speculation=mode)
        assert completion.finished is not None
        usage = completion.finished.usage
        assert sum(usage.drafted_by_position) == usage.drafted_tokens
        assert sum(usage.accepted_by_position) == usage.accepted_tokens
        assert usage.drafted_by_position[0] == usage.verifications
        assert len(usage.drafted_by_position) == len(usage.accepted_by_position) == 3
        assert usage.verifications + usage.accepted_tokens < usage.completion_tokens + 3
        info = await client.model_info()
        assert info.drafters == (Drafter.NGRAM, Drafter.DRAFT_EXECUTOR, Drafter.GRAMMAR)
        assert info.speculation == Speculation("auto")
        assert info.limits.max_draft_tokens == 64


async def test_logprobs_several_completions_and_a_stop_string_in_mid_draft_stay_as_they_are(
    shared: Stack,
) -> None:
    async with shared.client() as client:
        await eventually(lambda: drafting(client), "the draft executor is not taken")

        async def answer(mode: Speculation | str | int, stop: Sequence[str]) -> list[tuple[Any, ...]]:
            completions = await client.completions(
                "three",
                max_tokens=60,
                n=3,
                temperature=0.9,
                seed=5,
                logprobs=2,
                stop=stop,
                speculation=mode,  # type: ignore[arg-type]
            )
            return [
                (one.text, one.token_ids, one.logprobs, end.stop_string, end.usage.completion_tokens)
                for one in completions
                if (end := one.finished) is not None
            ]

        plain = await answer("off", [])
        text = str(plain[0][0])
        stop = [text[20:22]]
        stopped = await answer("off", stop)
        assert plain != stopped
        for mode in (5, "auto"):
            assert await answer(mode, []) == plain
            assert await answer(mode, stop) == stopped


@pytest.mark.parametrize("drafts", [0, 65])
async def test_a_number_of_drafts_beyond_the_limit_is_refused_by_name(drafts: int, shared: Stack) -> None:
    async with shared.client() as client:
        with pytest.raises(errors.InvalidRequest, match=r"^speculation: must be within"):
            await client.completions("x", max_tokens=1, speculation=drafts)


async def test_a_draft_executor_of_another_vocabulary_ends_the_scheduler_with_both_named(
    shared: Stack, tmp_path: Path
) -> None:
    stack = Stack(tmp_path)
    try:
        stack.drafts.append(stack.start_executor("--vocab-size", "100"))
        stack.start_scheduler("--log-format", "console", executors=shared.addresses[:1])
        assert await asyncio.to_thread(stack.scheduler.wait, 20) == 2
        last = stack.scheduler.log.strip().splitlines()[-1]
        assert f"--draft-executor {stack.drafts[0]}" in last
        assert "100 tokens, fingerprint none" in last
        assert "257 tokens, fingerprint " in last
        assert "Traceback" not in stack.scheduler.log
    finally:
        stack.kill()


async def test_a_request_that_only_the_draft_executor_drafts_for_is_warned_while_none_is_ready(
    shared: Stack, tmp_path: Path
) -> None:
    stack = Stack(tmp_path)
    try:
        stack.drafts.append(f"127.0.0.1:{kept_port()}")
        stack.start_scheduler(executors=shared.addresses[:1])
        await asyncio.to_thread(stack.scheduler.wait_serving)
        async with stack.client() as client:

            async def warnings(speculation: Speculation | int) -> tuple[str, ...]:
                generation = client.generate("x", max_tokens=2, speculation=speculation)
                await generation.collect()
                assert generation.started is not None
                return generation.started.warnings

            alone = Speculation(4, Drafter.DRAFT_EXECUTOR)
            (warning,) = await warnings(alone)
            assert warning.startswith("speculation.drafter: no draft executor is ready")
            assert stack.drafts[0] in warning, "an administrator gets no reason"
            assert not await warnings(4), "it has other drafters"
            await asyncio.to_thread(stack.start_executor, *DRAFT, port=int(stack.drafts[0].split(":")[1]))
            await eventually(lambda: drafting(client), "the draft executor is not taken")
            assert not await warnings(alone)
    finally:
        stack.kill()


async def test_a_draft_executor_that_comes_back_as_another_is_refused_and_decoding_goes_on(
    shared: Stack,
) -> None:
    async with shared.client() as client:
        await eventually(lambda: drafting(client), "the draft executor is not taken")
        expected = await tokens(client, "off")
        (draft,) = shared.drafts
        await asyncio.to_thread(shared.change_executor, draft, "--vocab-size", "100")

        async def refused() -> bool:
            shown = [one for one in (await client.executors()) if one.draft]
            return "vocabulary" in shown[0].detail and not shown[0].connected

        await eventually(refused, "it is not refused")
        assert await tokens(client, 4) == expected
        assert "draft executor refused" in shared.scheduler.log
        await asyncio.to_thread(shared.change_executor, draft, *DRAFT)
        await eventually(lambda: drafting(client), "the right one is not taken back")
        before = (await client.status()).drafted_tokens
        assert await tokens(client, Speculation(4, Drafter.DRAFT_EXECUTOR)) == expected
        assert (await client.status()).drafted_tokens > before


# -- the draft executor dies, freezes and comes back -------------------------------------------------


def killing(stack: Stack, address: str) -> Callable[[], None]:
    def disturb() -> None:
        stack.executor(address).kill()
        time.sleep(0.2)  # plain decoding meanwhile
        stack.restart_executor(address)

    return disturb


def freezing(stack: Stack, address: str) -> Callable[[], None]:
    """Frozen for a moment, and then alive again with all that it knew."""

    def disturb() -> None:
        process = stack.executor(address)
        process.signal(signal.SIGSTOP)
        time.sleep(1.0)
        process.signal(signal.SIGCONT)

    return disturb


FAULTS = [killing, freezing]


async def under_faults(stack: Stack, times: int, disturb: Callable[[], None]) -> float:
    """Streams follow one another while the fault strikes; returns the longest silence of any of them."""
    silences: list[float] = []
    async with stack.client() as client:
        await eventually(lambda: drafting(client), "the draft executor is not taken")
        expected = await tokens(client, "off")
        over = asyncio.Event()
        rounds = 0

        async def read(seed: int) -> list[int]:
            ids: list[int] = []
            last = time.monotonic()
            async for event in generation(client, seed, Speculation(4, Drafter.DRAFT_EXECUTOR)):
                silences.append(time.monotonic() - last)
                last = time.monotonic()
                if isinstance(event, Delta):
                    ids += event.token_ids
            return ids

        async def load() -> None:
            nonlocal rounds
            while not over.is_set():
                assert list(await asyncio.gather(*map(read, range(STREAMS)))) == expected
                rounds += 1

        loading = asyncio.create_task(load())

        async def drafts_again() -> None:
            before = (await client.status()).drafted_tokens

            async def drafted() -> bool:
                if loading.done():
                    loading.result()
                return (await client.status()).drafted_tokens > before

            await eventually(drafted, "it does not draft again", 2 * HEAL_S)

        await drafts_again()
        for _ in range(times):
            await asyncio.to_thread(disturb)
            await drafts_again()
        over.set()
        await loading
        assert rounds
        status = await client.status()
        assert (status.failed, status.cancelled) == (0, 0)
        assert [one.losses for one in await client.executors() if not one.draft] == [0]
    for address in stack.addresses:
        await stack.all_pages_back(address)
    return max(silences)


@pytest.mark.parametrize("fault", FAULTS)
async def test_streams_go_on_with_the_same_tokens_when_the_draft_executor_fails(
    fault: Callable[[Stack, str], Callable[[], None]], shared: Stack
) -> None:
    silence_s = await under_faults(shared, 2, fault(shared, shared.drafts[0]))
    assert silence_s < HEAL_S


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
async def test_streams_go_on_with_the_same_tokens_when_the_draft_executor_fails_20_times(
    fault: Callable[[Stack, str], Callable[[], None]], tmp_path: Path
) -> None:
    with oracle_stack(tmp_path, executor=EXECUTOR, draft=DRAFT) as stack:
        silence_s = await under_faults(stack, 20, fault(stack, stack.drafts[0]))
    print(f"\n{fault.__name__}: no stream was silent for longer than {silence_s * 1000:.0f} ms")


@pytest.mark.slow
async def test_streams_go_on_with_the_same_tokens_when_both_executors_fail(tmp_path: Path) -> None:
    with oracle_stack(tmp_path, executor=EXECUTOR, draft=DRAFT) as stack:
        (target,) = [address for address in stack.addresses if address not in stack.drafts]
        async with stack.client() as client:
            await eventually(lambda: drafting(client), "the draft executor is not taken")
            expected = await tokens(client, "off")
            for turn in range(6):
                running = asyncio.create_task(tokens(client, 4))
                await asyncio.sleep(0.1)
                for address in (target, stack.drafts[0]) if turn % 2 else (stack.drafts[0], target):
                    await asyncio.to_thread(stack.restart_executor, address)
                assert await running == expected
                await eventually(lambda: drafting(client), "the draft executor is not taken back")
            assert (await client.status()).failed == 0
        for address in stack.addresses:
            await stack.all_pages_back(address)
