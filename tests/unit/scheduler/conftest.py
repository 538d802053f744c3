from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh-traces", action="store_true", help="rewrite tests/traces")
