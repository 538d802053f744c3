"""Asserts on the error with which a request ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from scheduler_service.errors import ErrorReason, ServiceError


@contextmanager
def raises(reason: ErrorReason, match: str = "") -> Iterator[pytest.ExceptionInfo[ServiceError]]:
    """The block raises a ServiceError for this reason; its message matches the pattern."""
    with pytest.raises(ServiceError, match=match or None) as caught:
        yield caught
    assert caught.value.reason is reason
