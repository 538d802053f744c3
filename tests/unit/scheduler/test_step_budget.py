"""A step with prompts beside sequences that decode is bounded by its predicted time."""

from __future__ import annotations

import pytest

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.events import Event
from scheduler_service.core.prompt_budget import LEAST_PART, STEP_TIMES, WORTH
from scheduler_service.core.step import Capacity, PlannedStep, StepAnswer
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import STEP_S, Harness, make_request

ROOMY = Capacity(
    total_pages=4000, page_size=4, context_length=8000, max_sequences=16, max_rows=16, max_step_tokens=2048
)
CHUNK = 512
PASS_S, ROW_S, PROMPT_S = 0.02, 0.001, 0.0005


def prompt_tokens(plan: PlannedStep) -> int:
    """Tokens of prompts that a step feeds, at most."""
    return sum(row.limit for row in plan.rows) + sum(opening.limit for opening in plan.openings)


class Timed(Harness):
    """Its steps take a pass, a time for each row that decodes, and a time for each token of a prompt.

    fixed_s: what a step with tokens of prompts takes besides.
    """

    def __init__(self, prompt_s: float = PROMPT_S, fixed_s: float = 0.0, **settings: float) -> None:
        self._prompt_s, self._fixed_s = prompt_s, fixed_s
        config = CoreConfig(max_step_tokens=2048, prefill_chunk_tokens=CHUNK, **settings)  # type: ignore[arg-type]
        super().__init__(FakeExecutor(ROOMY), config)
        self.took: list[tuple[int, int, float]] = []  # rows that decode, tokens of prompts, seconds

    def answer(self, result: StepAnswer | None = None) -> list[Event]:
        plan = self.unanswered[0]
        rows, tokens = sum(not row.limit for row in plan.rows), prompt_tokens(plan)
        seconds = PASS_S + ROW_S * rows + self._prompt_s * tokens + self._fixed_s * (tokens > 0)
        self.now += seconds - STEP_S
        self.took.append((rows, tokens, seconds))
        return super().answer(result)

    def beside(
        self, decoding: int, prompts: int, tokens: int, steps: int = 200
    ) -> list[tuple[int, int, float]]:
        """The steps of which some rows decode and others feed prompts, after the time of steps is learned."""
        for i in range(decoding):
            self.add(make_request(f"stream {i}", range(i, i + 8), max_tokens=4000))
        for i in range(6):  # what steps take is learned from these
            self.add(make_request(f"early {i}", range(100 * i, 100 * i + 600), max_tokens=1))
            for _ in range(20):
                self.step()
        del self.took[:]
        for i in range(prompts):
            self.add(make_request(f"late {i}", range(1000 * i, 1000 * i + tokens), max_tokens=1))
        for _ in range(steps):
            self.step()
        return [one for one in self.took if one[0] and one[1]]


@pytest.mark.parametrize("decoding", [1, 4, 12])
@pytest.mark.parametrize("prompts", [1, 3])
def test_prompts_beside_streams_take_little_more_than_their_share_of_a_steps_time(
    decoding: int, prompts: int
) -> None:
    harness = Timed()
    mixed = harness.beside(decoding, prompts, 3000)
    assert len(mixed) > 10
    alone_s = PASS_S + ROW_S * decoding
    assert max(seconds for _, _, seconds in mixed) < 1.25 * STEP_TIMES * alone_s
    assert min(tokens for _, tokens, _ in mixed[:-prompts]) >= 1


@pytest.mark.parametrize("prompt_s", [PASS_S / 4, 2 * PASS_S / 3])
def test_streams_keep_a_third_of_their_speed_where_a_prompts_token_costs_much_of_a_step(
    prompt_s: float,
) -> None:
    harness = Timed(prompt_s=prompt_s)
    mixed = harness.beside(1, 1, 300)
    alone_s = PASS_S + ROW_S
    assert len(mixed) > 40
    assert max(seconds for _, _, seconds in mixed) < 3 * alone_s
    # And the prompt has at least half of the time.
    assert sum(tokens for _, tokens, _ in mixed) * prompt_s > 0.5 * sum(seconds for _, _, seconds in mixed)


def test_a_step_that_takes_long_for_any_prompt_feeds_as_much_as_makes_that_worth_it() -> None:
    harness = Timed(fixed_s=4 * PASS_S)
    mixed = harness.beside(1, 1, 3000)
    tokens = [tokens for _, tokens, _ in mixed[:-1]]
    assert min(tokens) * PROMPT_S > 0.8 * WORTH * 4 * PASS_S
    assert max(tokens) * PROMPT_S < 1.5 * WORTH * 4 * PASS_S


def test_prompts_get_a_part_of_the_time_where_a_budget_leaves_none() -> None:
    harness = Timed(step_budget_s=0.001)
    mixed = harness.beside(4, 1, 400)
    tokens = [tokens for _, tokens, _ in mixed[:-1]]
    assert 0.8 * LEAST_PART < sum(tokens) / len(tokens) * PROMPT_S / (PASS_S + 4 * ROW_S) < 1.2 * LEAST_PART


def test_a_prompt_alone_takes_whole_chunks() -> None:
    harness = Timed()
    harness.add(make_request("alone", range(3000), max_tokens=1))
    for _ in range(20):
        harness.step()
    assert [tokens for _, tokens, _ in harness.took][:5] == [CHUNK] * 5


def test_a_budget_in_seconds_bounds_the_step_instead() -> None:
    harness = Timed(step_budget_s=0.2)
    mixed = harness.beside(2, 2, 3000)
    longest = max(seconds for _, _, seconds in mixed)
    assert 0.1 < longest < 0.25


def test_with_a_budget_that_the_streams_alone_exceed_prompts_make_progress() -> None:
    harness = Timed(step_budget_s=0.001)
    harness.beside(4, 1, 400, steps=500)
    assert "late 0" in {request for request, _ in harness.finished}


def test_a_budget_that_bounds_nothing_gives_whole_chunks_beside_streams() -> None:
    harness = Timed(step_budget_s=600.0)
    mixed = harness.beside(2, 1, 3000)
    assert max(tokens for _, tokens, _ in mixed) == CHUNK
