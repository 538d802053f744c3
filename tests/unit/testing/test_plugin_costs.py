"""Where pytest-paceline is installed and not used, it imports nothing but itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = """
import sys

def pytest_collection_finish():
    heavy = {"grpc", "google", "paceline", "service_kit", "executor_service", "scheduler_service"}
    print("imported:", sorted(heavy & set(sys.modules)))
"""


def test_collecting_tests_imports_neither_grpc_nor_the_client(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_other.py").write_text("def test_it(paceline_fake, paceline_client): ...\n")
    variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "pytest_paceline", "-p", "no:cacheprovider", "--collect-only"],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "imported: []" in done.stdout, done.stdout + done.stderr
    assert "test_it" in done.stdout
