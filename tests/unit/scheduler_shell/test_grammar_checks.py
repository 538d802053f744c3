"""Grammars are checked by the executor before their requests are queued: in turns, in time, or not at all."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from service_kit.identity import Identity

from scheduler_service.core.request import OutputGrammar
from scheduler_service.errors import ErrorReason
from scheduler_service.grammars import MAX_CHECKS, GrammarChecks
from tests.unit.scheduler_shell.bad_ends import raises

ALICE, BOB = Identity("alice", "token"), Identity("bob", "token")
GRAMMAR = OutputGrammar("regex", "a+")


class Link:
    """Answers when it is let."""

    def __init__(self, why: str = "") -> None:
        self.why, self.asked, self.timeouts_s = why, 0, list[float]()
        self.go = asyncio.Event()
        self.late = False

    async def check_grammar(self, grammar: OutputGrammar, timeout_s: float) -> str | tuple[str, ...]:
        self.asked += 1
        self.timeouts_s.append(timeout_s)
        await self.go.wait()
        if self.late:
            raise TimeoutError
        return self.why or ("a word",)


def checks(link: Link | None) -> GrammarChecks:
    active: Any = link
    return GrammarChecks(lambda: active)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_executors_words_name_the_field() -> None:
    link = Link("grammar.regex: unclosed group: (")
    link.go.set()
    with raises(ErrorReason.INVALID_REQUEST) as caught:
        await checks(link).check(GRAMMAR, ALICE, None)
    assert (caught.value.field, caught.value.message) == (
        "grammar.regex",
        "grammar.regex: unclosed group: (",
    )


async def test_an_identity_has_few_checks_at_once_and_holds_up_nobody_else() -> None:
    link = Link()
    checker = checks(link)
    mine = [asyncio.create_task(checker.check(GRAMMAR, ALICE, None)) for _ in range(MAX_CHECKS + 3)]
    await turns()
    assert link.asked == MAX_CHECKS
    other = asyncio.create_task(checker.check(GRAMMAR, BOB, None))
    await turns()
    assert link.asked == MAX_CHECKS + 1
    link.go.set()
    await asyncio.gather(*mine, other)
    assert link.asked == MAX_CHECKS + 4


async def test_a_check_that_gets_no_turn_is_refused_and_may_be_retried() -> None:
    link: Any = Link()
    checker = GrammarChecks(lambda: link, max_wait_s=0.0)
    held = [asyncio.create_task(checker.check(GRAMMAR, ALICE, None)) for _ in range(MAX_CHECKS)]
    await turns()
    with raises(ErrorReason.QUOTA) as caught:
        await checker.check(GRAMMAR, ALICE, None)
    assert caught.value.retry_after_s
    assert link.asked == MAX_CHECKS
    link.go.set()
    await asyncio.gather(*held)
    await checker.check(GRAMMAR, ALICE, None)


async def test_a_check_takes_no_longer_than_its_call() -> None:
    link = Link()
    link.late = True
    link.go.set()
    with raises(ErrorReason.NOT_READY) as caught:
        await checks(link).check(GRAMMAR, ALICE, time.monotonic() + 2)
    assert caught.value.retry_after_s
    assert 0 < link.timeouts_s[0] <= 2


@pytest.mark.parametrize("deadline", [None, 0.0])
async def test_without_an_executor_nothing_is_checked(deadline: float | None) -> None:
    await checks(None).check(GRAMMAR, ALICE, deadline)
