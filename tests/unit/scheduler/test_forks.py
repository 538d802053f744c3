"""n > 1: one prompt is computed once and forked; each completion is what it would be alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from executor_service.contract import noise
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.request import Continued, index_seed
from scheduler_service.core.step import Code
from tests.unit.scheduler.engine_executor import EngineExecutor
from tests.unit.scheduler.fake_executor import FakeExecutor, next_token
from tests.unit.scheduler.harness import CAPACITY, STEP_S, Harness, make_request


def alone(prompt: list[int], seed: int, count: int) -> list[int]:
    """What the fake samples, computed here."""
    content = list(prompt)
    for _ in range(count):
        content.append(next_token(seed, content))
    return content[len(prompt) :]


@pytest.mark.parametrize("index", [0, 1, 2, 127])
@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_index_seeds_are_the_protos(seed: int, index: int) -> None:
    assert index_seed(seed, index) == noise.index_seed(seed, index)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9])  # pages hold 4
@pytest.mark.parametrize("pages", [4, 5, 7, 64])
def test_every_completion_has_its_own_seed_and_the_whole_prompt(length: int, pages: int) -> None:
    harness = Harness(FakeExecutor(replace(CAPACITY, total_pages=pages)))
    prompt = list(range(length))
    harness.add(make_request("a", prompt, n=4, max_tokens=7, seed=11))
    harness.run()
    for index in range(4):
        assert harness.tokens["a", index] == alone(prompt, index_seed(11, index), 7)


def test_the_prompt_is_computed_once_and_forked_in_the_next_step() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a", range(10), n=3))
    harness.step()
    plan = harness.plan()
    assert plan is not None
    assert [(fork.source_id, fork.cache_id, fork.length) for fork in plan.forks] == [(1, 2, 9), (1, 3, 9)]
    assert [(row.cache_id, row.kv_length, row.tokens) for row in plan.rows] == [
        (1, 10, ()),
        (2, 9, (9,)),
        (3, 9, (9,)),
    ]
    assert plan.openings == ()


def test_forks_wait_for_the_whole_prompt() -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(prefill_chunk_tokens=4))
    harness.add(make_request("a", range(12), n=2))
    for _ in range(3):
        plan = harness.plan()
        assert plan is not None
        assert not plan.forks
        harness.answer()
    plan = harness.plan()
    assert plan is not None
    assert len(plan.forks) == 1


def test_siblings_open_by_themselves_when_the_first_is_gone() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a", range(5), n=3, max_tokens=1))
    harness.run()
    for index in range(3):
        assert harness.tokens["a", index] == alone(list(range(5)), index_seed(7, index), 1)


def test_forks_take_turns_when_places_are_few() -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_running=2))
    harness.add(make_request("a", range(5), n=5, max_tokens=3))
    harness.add(make_request("b", range(5), max_tokens=3))
    harness.run()
    assert len(harness.finished) == 6


def test_a_refused_fork_is_tried_again() -> None:
    class Refusing(FakeExecutor):
        refusals = 2

        def _fork(self, fork):  # type: ignore[no-untyped-def]
            answer = super()._fork(fork)
            if self.refusals and not answer.code:
                self.refusals -= 1
                for page in self.caches.pop(fork.cache_id).pages:
                    self._drop(page)
                answer.code = Code.RESOURCE_EXHAUSTED
            return answer

    harness = Harness(Refusing(CAPACITY))
    harness.add(make_request("a", range(5), n=2, max_tokens=12))
    harness.run()
    assert harness.tokens["a", 1] == alone(list(range(5)), index_seed(7, 1), 12)


def test_cancelling_ends_all_completions() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a", range(5), n=4, max_tokens=50))
    for _ in range(4):
        harness.step()
    harness.cancel("a")
    plan = harness.plan()
    assert plan is not None
    assert len(plan.releases) == 4
    harness.answer()
    assert harness.idle


def test_cancelling_before_the_fork_ends_those_that_were_held() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a", range(5), n=4))
    assert harness.core.snapshot().waiting == 4
    harness.plan()
    harness.cancel("a")
    harness.answer()
    harness.run()
    assert harness.core.snapshot().counters.cancelled == 1


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_a_completion_that_would_be_late_ends_none_that_has_a_cache(steps: int) -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("before", range(8), max_tokens=30))  # teaches how long a step takes
    harness.run()
    deadline = harness.now + steps * STEP_S
    continued = (Continued(0, (7,), True),)  # so the other two prompts are computed each for itself
    harness.add(make_request("a", range(40), n=3, max_tokens=80, continued=continued, deadline=deadline))
    harness.run()  # checks that no step has a row of a cache that it releases
    assert "a" in harness.failed


@pytest.mark.parametrize("max_tokens", [1, 7])  # with 1 the siblings open by themselves
def test_a_prompt_counts_once_however_many_completions_share_it(max_tokens: int) -> None:
    harness = Harness(EngineExecutor(CAPACITY))
    for name, cached in (("a", 0), ("b", 8)):  # two whole pages
        harness.add(make_request(name, range(10), n=3, max_tokens=max_tokens))
        harness.run()
        first, *others = [harness.finished[name, index].usage.cached_tokens for index in range(3)]
        assert first == cached
        assert all(cached <= other <= 10 for other in others)  # of the same prompt: forks copy it
    counters = harness.core.snapshot().counters
    assert (counters.prompt_tokens, counters.cached_tokens) == (20, 8)


def test_output_that_was_produced_elsewhere_is_no_prompt_that_was_cached() -> None:
    harness = Harness(EngineExecutor(CAPACITY))
    first = make_request("a", range(10), max_tokens=20)
    harness.add(first)
    harness.run()
    output = tuple(harness.tokens["a", 0][:12])
    harness.add(replace(first, id="b", continued=(Continued(0, output, False),)))
    harness.run()
    assert harness.finished["b", 0].usage.cached_tokens == 10
