"""Refusals of a message: of a row or an op, as a value; of the whole step, as an exception."""

from __future__ import annotations

from executor_service.contract.plan import Reason, Refusal, RequestRefused


def invalid(message: str) -> Refusal:
    """A row or op whose value is wrong."""
    return Refusal(Reason.INVALID, message)


def too_large(message: str) -> Refusal:
    """A row or op that exceeds a limit of GetInfo."""
    return Refusal(Reason.TOO_LARGE, message)


def unsupported(field: str) -> Refusal:
    """A row or op that sets a field whose feature GetInfo does not advertise."""
    return Refusal(Reason.UNSUPPORTED, f"{field}: this executor does not offer it")


def refused(message: str) -> RequestRefused:
    """A step whose shape is wrong."""
    return RequestRefused(Reason.INVALID, message)


def oversized(message: str) -> RequestRefused:
    """A step that exceeds a limit of GetInfo."""
    return RequestRefused(Reason.TOO_LARGE, message)
