"""Drafts and their acceptance: caught by test_verify.py."""

from __future__ import annotations

from typing import Any

from executor_service.steps.commit import StepCommit
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def lost_rollback() -> None:
    """rejected drafts stay in the cache"""

    def finish(original: Any, self: StepCommit, row: Any, length: int, known: int, output: Any) -> None:
        rejected = len(row.drafts) - (len(row.tokens) - 1) if row.tokens and len(row.drafts) else 0
        ids = row.sequence.ids
        if rejected:
            ids[length : length + rejected] = row.drafts[len(row.tokens) - 1 :]
            ids[length + rejected] = row.tokens[-1]
        original(self, row, length + rejected, known + rejected, output)

    wrap(StepCommit, "_finish", finish)


@mutant()
def rejected_draft_goes_on() -> None:
    """after a rejection the next row feeds the draft instead of the token that was sampled"""

    def finish(original: Any, self: StepCommit, row: Any, length: int, known: int, output: Any) -> None:
        if row.tokens and len(row.tokens) <= len(row.drafts):
            row.sequence.ids[length] = row.drafts[len(row.tokens) - 1]
        original(self, row, length, known, output)

    wrap(StepCommit, "_finish", finish)


@mutant()
def draft_taken_on_trust() -> None:
    """the first draft is accepted unseen"""

    def absorb(original: Any, self: StepCommit, row: Any, output: Any) -> Any:
        if len(row.drafts) and output.tokens is not None:
            output.tokens[len(output.tokens) - len(row.drafts) - 1] = row.drafts[0]
        return original(self, row, output)

    wrap(StepCommit, "_absorb", absorb)
