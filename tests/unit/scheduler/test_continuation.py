"""Output that was produced elsewhere is continued as if there had been no interruption."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.errors import NeverFits, NoRoom
from scheduler_service.core.events import EndReason
from scheduler_service.core.request import Continued, Request
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, Harness, make_request


def solo(request: Request) -> Harness:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(request)
    harness.run()
    return harness


@given(
    n=st.integers(1, 3),
    max_tokens=st.integers(1, 12),
    min_tokens=st.integers(0, 3),
    data=st.data(),
)
def test_a_continued_request_ends_as_the_uninterrupted_one(
    n: int, max_tokens: int, min_tokens: int, data: st.DataObject
) -> None:
    request = make_request(
        "a",
        n=n,
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        eos_token_ids=frozenset(range(0, 40, 3)),
    )
    whole = solo(request)
    continued = []
    for index in range(n):
        ids = whole.tokens["a", index]
        had = data.draw(st.integers(0, len(ids)))
        finished = had == len(ids) and data.draw(st.booleans())
        if had:
            continued.append(Continued(index, tuple(ids[:had]), finished))
    over = {one.index for one in continued if one.finished}
    if len(over) == n:
        return
    resumed = solo(replace(request, continued=tuple(continued)))
    for index in range(n):
        key = "a", index
        assert resumed.tokens[key] == whole.tokens[key]
        if index in over:
            assert key not in resumed.finished
            continue
        mine, theirs = resumed.finished[key], whole.finished[key]
        assert (mine.reason, mine.matched_id) == (theirs.reason, theirs.matched_id)
        assert mine.usage.completion_tokens == theirs.usage.completion_tokens
        assert mine.usage.prompt_tokens == theirs.usage.prompt_tokens
    assert not resumed.failed


def test_what_already_ended_is_told_at_once_and_computes_nothing() -> None:
    request = make_request("a", max_tokens=2, continued=(Continued(0, (5, 6)),))
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(request)
    assert harness.finished["a", 0].reason is EndReason.LENGTH
    assert harness.plan() is None


def test_more_continued_tokens_than_may_come_are_refused() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    with pytest.raises(NeverFits, match="more than fit"):
        harness.add(make_request("a", max_tokens=2, continued=(Continued(0, (5, 6, 7)),)))


def test_continued_tokens_are_charged_to_the_queue() -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_queued_tokens=20))
    request = make_request("a", max_tokens=30)
    room = 20 - len(request.prompt)
    harness.add(replace(request, continued=(Continued(0, tuple(range(room))),)))
    with pytest.raises(NoRoom, match="20 tokens are queued"):
        harness.add(make_request("b", max_tokens=2))
