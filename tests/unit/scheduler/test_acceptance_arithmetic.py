"""Tokens per verification are what the theory says: (1 - a^(g + 1)) / (1 - a) at acceptance a and g drafts.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv:2211.17192), equation 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.request import DraftingWish, DraftSource, Request, SamplingSettings
from scheduler_service.core.step import Capacity
from tests.unit.scheduler.engine_executor import EngineExecutor, oracle
from tests.unit.scheduler.harness import Harness

SEQUENCES = 64
MAX_TOKENS = 400
CONTEXT = 512
VOCABULARY = 512  # two unlike rows of logits seldom have the same maximum
CAPACITY = Capacity(SEQUENCES * CONTEXT // 16, 16, CONTEXT, SEQUENCES, SEQUENCES, 4096)


@dataclass
class Count:
    """Verifications with all the drafts that were asked for, each sequence's last one left out."""

    drafts: int
    verifications: int = 0
    tokens: int = 0
    _last: dict[int, int] = field(default_factory=dict)  # by cache, until there is another

    def add(self, cache_id: int, drafts: int, tokens: int) -> None:
        if drafts == self.drafts:
            if (before := self._last.get(cache_id)) is not None:
                self.verifications += 1
                self.tokens += before
            self._last[cache_id] = tokens


def count(agreement: float, drafts: int, at_least: int) -> Count:
    """Rounds of SEQUENCES requests through the core and both engines, until enough was verified."""
    config = CoreConfig(max_step_tokens=4096, prefill_chunk_tokens=64)
    draft = EngineExecutor(CAPACITY, oracle(CONTEXT, agreement, VOCABULARY))
    run = Harness(EngineExecutor(CAPACITY, oracle(CONTEXT, vocabulary=VOCABULARY)), config, draft=draft)
    counted = Count(drafts)
    serial = 0
    while counted.verifications < at_least:
        for _ in range(SEQUENCES):
            serial += 1
            prompt = (serial % VOCABULARY, serial // VOCABULARY, drafts)
            speculation = DraftingWish(frozenset({DraftSource.EXECUTOR}), drafts)
            run.add(Request(str(serial), prompt, SamplingSettings(), MAX_TOKENS, speculation=speculation))
        while not run.idle:
            while run.plan_draft() is not None:
                run.answer_draft()
            if (plan := run.plan()) is not None:
                result = run.executor.execute(plan)
                run.answer(result)
                for row, answer in zip(plan.rows, result.rows, strict=False):
                    counted.add(row.cache_id, len(row.drafts), len(answer.tokens))
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("agreement", [0.6, 0.8, 0.9])
def test_tokens_per_verification_follow_from_the_agreement(agreement: float) -> None:
    total = 0
    for drafts in range(1, 9):
        counted = count(agreement, drafts, at_least=12_500)
        expected = (1 - agreement ** (drafts + 1)) / (1 - agreement)
        measured = counted.tokens / counted.verifications
        print(f"a {agreement} g {drafts}: {measured:.4f} measured, {expected:.4f} expected")
        assert measured == pytest.approx(expected, rel=0.03)
        total += counted.verifications
    assert total >= 100_000
