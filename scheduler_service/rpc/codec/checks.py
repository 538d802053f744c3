"""Range and size checks of a request's fields; errors name the field."""

from __future__ import annotations

from scheduler_service.errors import invalid


def check_range(field: str, value: int, low: int, high: int) -> None:
    """Raises ServiceError if `value` is outside [low, high]."""
    if not low <= value <= high:
        raise invalid(field, f"must be within [{low}, {high}], not {value}")


def check_size(field: str, size: int, limit: int, unit: str) -> None:
    """Raises ServiceError if `size`, in `unit`, is above the limit."""
    if size > limit:
        raise invalid(field, f"has {size} {unit}, at most {limit} are allowed")
