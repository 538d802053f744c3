"""Tokens of queued sequences are held once per request, as packed as they came."""

from __future__ import annotations

import tracemalloc
from array import array

import pytest

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.request import Continued, DraftingWish, DraftSource, Request, SamplingSettings
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.step import Capacity

PROMPT, REQUESTS = 8192, 8


@pytest.mark.parametrize("n", [1, 8])
def test_a_queued_prompt_takes_four_bytes_a_token(n: int) -> None:
    core = StepScheduler(CoreConfig())
    core.executor_ready(Capacity(1 << 20, 16, 1 << 20, 16, 16, 1 << 12), 0.0)
    wish = DraftingWish(frozenset({DraftSource.NGRAM}))
    tracemalloc.start()
    for i in range(REQUESTS):
        prompt = array("I", range(1000, 1000 + PROMPT))
        core.add(Request(str(i), prompt, SamplingSettings(), max_tokens=4, n=n, speculation=wish), 0.0)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 6 * PROMPT * REQUESTS  # two bytes a token for all else; a second copy would be four more


def test_a_prompt_is_not_changed_by_what_follows_it() -> None:
    core = StepScheduler(CoreConfig())
    core.executor_ready(Capacity(1 << 20, 16, 1 << 20, 16, 16, 1 << 12), 0.0)
    prompt = array("I", [1, 2, 3])
    continued = (Continued(0, (7, 8)), Continued(1, (9,)))
    core.add(Request("a", prompt, SamplingSettings(), n=3, continued=continued), 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    assert [opening.tokens for opening in plan.openings] == [(1, 2, 3, 7, 8)]
    assert [len(s.tokens) for s in core._registry.get("a").sequences] == [5, 4, 3]  # type: ignore[union-attr]
    assert prompt == array("I", [1, 2, 3])
