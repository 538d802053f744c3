"""Fixtures of Paceline for pytest, which finds this package by its entry point.

Installed and not used, the plugin costs the import of this file and of `asynchronous`: gRPC and the client
are imported by the first fixture that needs them.

    paceline_fake             a FakeScheduler, for each test
    paceline_service          a LiveService, for the session; set up by `paceline_config`
    paceline_client           a blocking client of it
    paceline_aio_client       an asyncio client of it; needs pytest-asyncio or anyio
    paceline_module_service   a LiveService for each module; set up by `paceline_module_config`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from paceline import Client
    from paceline.testing import FakeScheduler, LiveConfig, LiveService


def pytest_configure(config: pytest.Config) -> None:
    """Add the asyncio fixture. Its decorator depends on the plugins, which are all loaded by now."""
    from pytest_paceline import asynchronous

    config.pluginmanager.register(asynchronous, asynchronous.__name__)


@pytest.fixture(scope="session")
def paceline_config() -> LiveConfig:
    """How `paceline_service` is started: override it, in the conftest.py beside the tests."""
    from paceline.testing import LiveConfig

    return LiveConfig()


@pytest.fixture(scope="session")
def paceline_service(paceline_config: LiveConfig) -> Iterator[LiveService]:
    """A live service without a model, for all tests of the session (with xdist: of each worker)."""
    from paceline.testing import LiveService

    with LiveService(paceline_config) as service:
        yield service


@pytest.fixture(scope="module")
def paceline_module_config(paceline_config: LiveConfig) -> LiveConfig:
    """How `paceline_module_service` is started: override it in the module."""
    return paceline_config


@pytest.fixture(scope="module")
def paceline_module_service(paceline_module_config: LiveConfig) -> Iterator[LiveService]:
    """A live service without a model, for the tests of one module."""
    from paceline.testing import LiveService

    with LiveService(paceline_module_config) as service:
        yield service


@pytest.fixture
def paceline_client(paceline_service: LiveService) -> Iterator[Client]:
    """A blocking client of `paceline_service`."""
    with paceline_service.client() as client:
        yield client


@pytest.fixture
def paceline_fake() -> Iterator[FakeScheduler]:
    """A FakeScheduler. The test fails at its end if a call came for which there was no reply."""
    from paceline.testing import FakeScheduler

    with FakeScheduler() as fake:
        yield fake
    if fake.unanswered:
        pytest.fail(f"the FakeScheduler had no reply to {fake.unanswered}", pytrace=False)
