"""The fixture `paceline_aio_client`, for pytest-asyncio if that is loaded, else for anyio."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING or "pytest_asyncio" not in sys.modules:
    fixture = pytest.fixture
else:
    from pytest_asyncio import fixture  # in strict mode, it leaves fixtures of others alone

if TYPE_CHECKING:
    from paceline import aio
    from paceline.testing import LiveService


@fixture
async def paceline_aio_client(paceline_service: LiveService) -> AsyncIterator[aio.Client]:
    """An asyncio client of `paceline_service`, in the test's event loop."""
    async with paceline_service.aio_client() as client:
        yield client
