"""Where the default model lies, and transformers' own reading of it."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


def default_model() -> Path:
    """The default model's GGUF file; a test that needs it fails without it."""
    path = Path(os.environ.get("PACELINE_TEST_MODEL", _ROOT / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    if not path.is_file():
        pytest.fail(f"{path} is missing: run `make model`")
    return path


def varied_text() -> str:
    """Prose and code of every kind, some 20,000 tokens."""
    import argparse
    import json.encoder
    import statistics
    import textwrap

    return "\n".join(inspect.getsource(module) for module in (textwrap, statistics, json.encoder, argparse))
