"""Refusals of a message: of a row or an op, as a value; of the whole step, as an exception."""

from __future__ import annotations

from executor_service.contract.plan import Reason, Refusal, StepRefused


def invalid(message: str) -> Refusal:
    """A row or op whose value is wrong."""
    return Refusal(Reason.INVALID, message)


def too_large(message: str) -> Refusal:
    """A row or op that exceeds a limit of GetInfo."""
    return Refusal(Reason.TOO_LARGE, message)


def refused(message: str) -> StepRefused:
    """A step whose shape is wrong."""
    return StepRefused(Reason.INVALID, message)


def oversized(message: str) -> StepRefused:
    """A step that exceeds a limit of GetInfo."""
    return StepRefused(Reason.TOO_LARGE, message)
