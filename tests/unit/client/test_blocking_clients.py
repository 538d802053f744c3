"""The blocking clients are generated from the asyncio ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GENERATOR = Path(__file__).parents[3] / ".ci" / "blocking-clients"


def test_the_committed_blocking_clients_are_what_the_asyncio_ones_generate() -> None:
    command: list[str | Path] = [sys.executable, GENERATOR, "--check"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not found.stderr
