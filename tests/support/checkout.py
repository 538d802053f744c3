"""This checkout, and the environment in which other processes run its code."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """This process's environment, with the checkout first where Python looks for modules."""
    path = [str(ROOT), str(ROOT / "clients" / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
