"""Live services for hostile clients, and how many requests they send."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processes import ServiceProcess, running

SMALL_POOL = ("--backend", "oracle", "--pages", "256", "--max-sequences", "64", "--lease-ms", "2000")


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running("executor_service", list(SMALL_POOL), tmp_path_factory.mktemp("executor")) as process:
        yield process


@pytest.fixture(scope="module")
def scheduler(executor: ServiceProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    arguments = ["--executor", executor.address, "--max-queued-requests", "64"]
    with running("scheduler_service", arguments, tmp_path_factory.mktemp("scheduler")) as process:
        yield process


@pytest.fixture(
    params=[pytest.param(400, id="some"), pytest.param(10_000, id="many", marks=pytest.mark.slow)]
)
def count(request: pytest.FixtureRequest) -> int:
    return int(request.param)
