"""Drafts and their acceptance: caught by test_verify.py."""

from __future__ import annotations

from typing import Any

from executor_service.backends.oracle_backend import clocked_oracle
from executor_service.steps.accepted_row import AcceptedRow
from executor_service.steps.commit import StepCommit
from tests.conformance.kit.target import SLOW
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


@mutant(SLOW)
def bound_behind_drafts_taken_for_the_length() -> None:
    """a row sent after an unanswered verification goes on as if all its drafts had been accepted"""
    wrap(AcceptedRow, "begin_at", lambda original, self, start: None)


@mutant(SLOW)
def last_sampled_token_taken_for_the_last_accepted_one() -> None:
    """a row after an unanswered verification feeds what was sampled after the drafts that it rejected"""

    def resolved(original: Any, row: Any, former: Any, output: Any) -> Any:
        found = original(row, former, output)
        if output.tokens is not None:
            found.tokens[0] = output.tokens[-1]
        return found

    wrap(clocked_oracle, "resolved", resolved)
