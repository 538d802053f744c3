"""The reasons before the queue, on a served oracle: `why` names each while it lasts, and what ends it does.

Helper processes are stopped with SIGSTOP, so that a wait lasts until the test ends it.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from os import kill
from pathlib import Path
from typing import Any

import pytest
from paceline import aio
from paceline.types import RequestWait

from tests.support.processes import stop
from tests.support.stack import Stack, eventually, oracle_stack

BURST = 200
Ask = Callable[[aio.Client, str], Awaitable[object]]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with oracle_stack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[aio.Client]:
    async with stack.client() as client:
        yield client


def children(pid: int) -> list[int]:
    """Processes that a process has started, by any of its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found += map(int, (task / "children").read_text().split())
    return found


class Held:
    """The helper processes of a service, stopped; those that it starts meanwhile too, at each `again`."""

    def __init__(self, pid: int) -> None:
        self._pid, self._stopped = pid, set[int]()

    def again(self) -> None:
        for pid in children(self._pid):
            with suppress(ProcessLookupError):
                stop(pid)
            self._stopped.add(pid)

    def go(self) -> None:
        for pid in self._stopped:
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGCONT)


@contextmanager
def held(pid: int) -> Iterator[Held]:
    holder = Held(pid)
    holder.again()
    try:
        yield holder
    finally:
        holder.go()


async def waits_for(client: aio.Client, request_id: str, reason: str, holder: Held) -> RequestWait:
    """What `why` says of the request, once it waits for this reason."""
    found: list[RequestWait] = []

    async def named() -> bool:
        holder.again()
        found[:] = (await client.why(request_id)).requests
        return bool(found) and (found[0].phase, found[0].reason) == ("arriving", reason)

    await eventually(named, f"no wait for {reason}: {found}")
    return found[0]


async def ended(client: aio.Client, request_id: str) -> dict[str, int]:
    """The waits of a request that has ended: microseconds by reason."""
    [known] = (await client.why(request_id)).requests
    assert known.phase == "ended"
    return dict(known.queue_waits)


TEXTS: dict[str, Ask] = {
    "text": lambda client, name: client.complete("hello", request_id=name, max_tokens=1),
    "messages": lambda client, name: client.chat("hello", request_id=name, max_tokens=1),
    "evaluation": lambda client, name: client.score(["hello"], request_id=name),
}
GRAMMARS: dict[str, Ask] = {
    "regex": lambda client, name: constrained(client, name, regex="[ab]+c"),
    "schema": lambda client, name: constrained(client, name, schema={"type": "integer", "minimum": 3}),
    "choices": lambda client, name: constrained(client, name, choices=["yes", "no"]),
}


async def constrained(client: aio.Client, request_id: str, **grammar: Any) -> object:
    return await client.completions(token_ids=[1, 2], request_id=request_id, max_tokens=1, **grammar)


@pytest.mark.parametrize("ask", TEXTS.values(), ids=TEXTS)
async def test_a_prompt_that_becomes_tokens_waits_for_that(
    stack: Stack, client: aio.Client, ask: Ask, request: pytest.FixtureRequest
) -> None:
    name = f"tokenized-{request.node.callspec.id}"
    await ask(client, f"{name}-before")  # so that the tokenizer has started
    with held(stack.scheduler.pid) as holder:
        asked = asyncio.ensure_future(ask(client, name))
        so_far = await waits_for(client, name, "tokenizing", holder)
        status = await client.status()
        assert (status.arriving, status.waiting) == (1, 0)
    await asked
    waits = await ended(client, name)
    assert "becomes tokens" in so_far.explanation
    assert waits["tokenizing"] >= so_far.queue_waits["tokenizing"]
    assert max(waits, key=waits.__getitem__) == "tokenizing"


@pytest.mark.parametrize("ask", GRAMMARS.values(), ids=GRAMMARS)
async def test_a_request_waits_for_its_grammar_to_be_compiled(
    stack: Stack, client: aio.Client, ask: Ask, request: pytest.FixtureRequest
) -> None:
    [executor] = stack.addresses
    name = f"compiled-{request.node.callspec.id}"
    with held(stack.executor(executor).pid) as holder:
        asked = asyncio.ensure_future(ask(client, name))
        so_far = await waits_for(client, name, "grammar_compiling", holder)
    await asked
    waits = await ended(client, name)
    assert "compiles its grammar" in so_far.explanation
    assert waits["grammar_compiling"] >= so_far.queue_waits["grammar_compiling"]
    assert max(waits, key=waits.__getitem__) == "grammar_compiling"


TURNS: dict[str, Ask] = {
    "generate": lambda client, name: client.complete(token_ids=[1], request_id=name, max_tokens=1),
    "unread text": lambda client, name: client.complete("x" * 500, request_id=name, max_tokens=1),
    "evaluation": lambda client, name: client.score([[1, 2]], request_id=name),
}


@pytest.mark.parametrize("ask", TURNS.values(), ids=TURNS)
async def test_calls_of_a_burst_wait_for_those_of_their_caller_before_them(
    client: aio.Client, ask: Ask, request: pytest.FixtureRequest
) -> None:
    """And single calls do not: fewer at once is what would end the wait."""
    name = "turn-" + request.node.callspec.id.replace(" ", "-")
    for i in range(9):
        await ask(client, f"{name}-single-{i}")
    singles = [(await ended(client, f"{name}-single-{i}"))["callers_turn"] for i in range(9)]
    await asyncio.gather(*(ask(client, f"{name}-{i}") for i in range(BURST)))
    burst = [await ended(client, f"{name}-{i}") for i in range(BURST)]
    assert max(waits.get("callers_turn", 0) for waits in burst) > 5 * statistics.median(singles)


async def test_a_request_that_waited_for_all_three_has_each_in_its_sums(
    stack: Stack, client: aio.Client
) -> None:
    [executor] = stack.addresses
    with held(stack.executor(executor).pid) as compiler:
        asked = asyncio.ensure_future(
            client.completions("hello", request_id="mixed", max_tokens=1, regex="[cd]+")
        )
        compiling = await waits_for(client, "mixed", "grammar_compiling", compiler)
        with held(stack.scheduler.pid) as tokenizer:
            compiler.go()
            tokenizing = await waits_for(client, "mixed", "tokenizing", tokenizer)
    [completion] = await asked
    assert completion.finished is not None
    usage, waits = completion.finished.usage, await ended(client, "mixed")
    assert waits["grammar_compiling"] >= compiling.queue_waits["grammar_compiling"]
    assert waits["tokenizing"] >= tokenizing.queue_waits["tokenizing"]
    assert "callers_turn" in waits
    assert sum(waits.values()) == pytest.approx(1000 * usage.queue_ms, abs=600)
