"""The mutants are our own executor's: nothing for those who check another."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("--executor", default=None) else None
