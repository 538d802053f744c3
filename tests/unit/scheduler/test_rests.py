"""Sequences whose text does not repeat rest: few decisions, and drafts again soon after it repeats."""

from __future__ import annotations

from functools import partial

import pytest

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.drafting.speculator import FRUITLESS_DECISIONS, MAX_REST
from scheduler_service.core.request import DraftingWish, DraftSource, Request, SamplingSettings
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.speculation.draft_state import FREE_TOKENS, DraftState
from scheduler_service.core.speculation.ngram import SPARSE_STRIDE, NgramIndex
from scheduler_service.core.step import Capacity
from tests.bench.core_overhead import Text, answer, chance

PROMPT = 40
DETECTED = 6
"""Tokens of a repetition after which its match is promising: two make a pair, the others make it long."""


class Decode:
    """A core with `count` sequences that decode; its executor writes `text`."""

    def __init__(self, count: int, text: Text, length: int | None = None) -> None:
        capacity = Capacity(1 << 16, 16, 1 << 20, count, count, 1 << 16)
        self.core = StepScheduler(CoreConfig(max_step_tokens=1 << 16, max_running=count))
        self.core.executor_ready(capacity, 0.0)
        self.text, self.now = text, 0.0
        speculation = DraftingWish(frozenset({DraftSource.NGRAM}), length)
        for i in range(count):
            prompt = tuple(text(i + 1, at) for at in range(PROMPT))
            self.core.add(Request(str(i), prompt, SamplingSettings(), speculation=speculation), 0.0)

    def step(self) -> None:
        plan = self.core.plan(self.now)
        assert plan is not None
        self.now += 0.02
        self.core.apply(answer(plan, 1 << 15, self.text), self.now)

    @property
    def states(self) -> list[DraftState]:
        return [s.draft_state for s in self.core._pool.running if s.draft_state is not None]


def repeating(sequence: int, position: int, at: int, source: int) -> int:
    """Tokens that never recur up to position `at`; then those from `source` to `at`, over and over."""
    return sequence * 10_000 + (position if position < at else source + (position - at) % (at - source))


NEVER = partial(repeating, at=1 << 20, source=0)


def late(count: int, at: int, source: int) -> list[int]:
    """Of each sequence: tokens of the repetition that are known when it is first noticed."""
    decode = Decode(count, partial(repeating, at=at, source=source))
    noticed: dict[int, int] = {}
    for _ in range(at + 2 * MAX_REST):
        decode.step()
        for i, sequence in enumerate(decode.core._pool.running):
            if sequence.draft_state is not None and sequence.draft_state.promising_at >= at:
                noticed.setdefault(i, sequence.draft_state.promising_at - at)
        if len(noticed) == count:
            break
    assert len(noticed) == count
    return list(noticed.values())


@pytest.mark.parametrize("source", [3, PROMPT + 90, PROMPT + 143], ids=["prompt", "output", "unaligned"])
@pytest.mark.parametrize("count", [1, 16, 256])
def test_a_text_that_repeats_late_is_noticed_within_a_rest(count: int, source: int) -> None:
    plain = 200
    bound = min(MAX_REST, count // FRUITLESS_DECISIONS)
    assert max(late(count, PROMPT + plain, source)) <= DETECTED + bound


def test_a_sequence_does_not_rest_before_it_had_nothing_promising_for_a_while() -> None:
    assert max(late(256, PROMPT + FREE_TOKENS, 3)) <= DETECTED


@pytest.mark.parametrize("text", [NEVER, partial(chance, tokens=64)])
def test_sequences_without_drafts_are_decided_about_rarely(text: Text) -> None:
    count, decisions = 256, 0
    decode = Decode(count, text)
    for step in range(320):
        before = [state.decided_at for state in decode.states]
        decode.step()
        if step >= 160:
            decisions += sum(a != b.decided_at for a, b in zip(before, decode.states, strict=True))
    assert decisions / 160 <= 2 * FRUITLESS_DECISIONS
    at_once = {state.plain_until for state in decode.states}
    assert len(at_once) > count // FRUITLESS_DECISIONS // 3  # their rests do not end together


def test_no_rest_is_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_service.core.drafting.speculator.MAX_REST", 8)
    decode = Decode(64, NEVER)
    for _ in range(60):
        decode.step()
    assert max(state.plain_until - state.decided_at for state in decode.states) == 8


def test_a_fixed_length_never_rests() -> None:
    decode = Decode(64, NEVER, length=4)
    for _ in range(60):
        decode.step()
    assert all(state.decided_at >= PROMPT + 58 for state in decode.states)


@pytest.mark.parametrize("offset", range(2 * SPARSE_STRIDE))
def test_what_was_indexed_sparsely_is_found_wherever_it_begins(offset: int) -> None:
    tokens = list(range(100))
    index = NgramIndex(tokens)
    index.update()
    tokens += range(200, 240)
    index.update(stride=SPARSE_STRIDE)
    tokens += [*range(300, 340), *range(205 + offset, 205 + offset + SPARSE_STRIDE + 1)]
    index.update(stride=SPARSE_STRIDE)
    assert index.match_length == SPARSE_STRIDE + 1
    assert index.propose(2) == [205 + offset + SPARSE_STRIDE + 1, 205 + offset + SPARSE_STRIDE + 2]
