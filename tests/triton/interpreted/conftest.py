"""These tests are collected only where TRITON_INTERPRET=1, see test_without_a_gpu.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.triton.mended import INTERPRETED, mended_interpreter

collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _mended_interpreter() -> Iterator[None]:
    with mended_interpreter():
        yield
