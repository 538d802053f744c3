"""Scores of a prompt's tokens: caught by test_scores.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from executor_service.backends.numpy_sampler import adjust
from executor_service.backends.oracle_backend import oracle
from executor_service.cache.sequence import CachedSequence
from executor_service.contract.plan import Opening
from executor_service.steps import commit, forwards
from executor_service.steps.accepted_row import AcceptedRow
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def score_shifted_by_one() -> None:
    """a token gets the score of the token after it"""

    def shifted(original: Any, row: AcceptedRow, end: int, **given: Any) -> Any:
        prompt = original(row, end, **given)
        return prompt and replace(prompt, targets=np.roll(prompt.targets, -1))

    wrap(forwards, "_prompt_outputs", shifted)


@mutant()
def scores_lost_at_a_prefix_hit() -> None:
    """tokens that the prefix cache has get no score"""
    Opening.max_hit = property(lambda self: len(self.tokens) - 1)  # type: ignore[assignment,method-assign]


@mutant()
def scores_after_penalties() -> None:
    """scores are of the logits that tokens are sampled from"""

    def adjusted(original: Any, row: Any, output: Any, hidden: Any, vocab_size: int, logits: Any) -> Any:
        first = len(row.history) - len(hidden) + 1

        def changed(part: slice) -> Any:
            lengths = range(first + part.start, first + part.stop)
            return np.stack(
                [
                    adjust(one, row.history[:length], row.prompt_length, row.sampling)
                    for one, length in zip(logits(part), lengths, strict=True)
                ]
            )

        return original(row, output, hidden, vocab_size, changed)

    wrap(oracle, "add_prompt_outputs", adjusted)


@mutant()
def scores_of_the_first_chunk_alone() -> None:
    """the chunks that follow an opening bring no scores"""

    def forgetful(original: Any, row: AcceptedRow, output: Any, result: Any) -> None:
        original(row, output, result)
        if not row.opened:
            result.scores = None

    wrap(commit, "_add_prompt_outputs", forgetful)


@mutant()
def given_tokens_are_scored() -> None:
    """what is given after a truncation is scored as if the opening had it"""

    def keeps(original: Any, self: Any, length: int) -> None:
        scored = self.scored
        original(self, length)
        self.scored = scored

    wrap(CachedSequence, "forget_pending", keeps)
