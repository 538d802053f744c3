"""Checks that every field of a request needs; each refusal names the field."""

from __future__ import annotations

from scheduler_service.errors import invalid


def check_range(field: str, value: int, low: int, high: int) -> None:
    """Raises ServiceError if it is outside."""
    if not low <= value <= high:
        raise invalid(field, f"must be within [{low}, {high}], not {value}")


def check_size(field: str, size: int, most: int, unit: str) -> None:
    """Raises ServiceError if there are more than `most`."""
    if size > most:
        raise invalid(field, f"has {size} {unit}, at most {most} are allowed")
