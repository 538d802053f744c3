"""What `paceline serve --openai` offers, asked for with OpenAI's own SDKs, of the default model."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator

import pytest

from tests.gateway.check import run
from tests.gateway.support import url_of
from tests.model.default_model import default_model
from tests.support.checkout import ROOT
from tests.support.serve import Serve, serving

pytestmark = pytest.mark.openai


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    model = ("--model", str(default_model()))
    with serving(tmp_path_factory.mktemp("served"), *model, "--openai", "0", backend="torch") as serve:
        yield serve
        assert "Traceback" not in serve.log


@pytest.mark.model
def test_the_python_sdk_gets_everything_that_is_offered(served: Serve) -> None:
    without = {"tools"}  # which its chat template does not have
    assert asyncio.run(run(url_of(served), "", served.address, "", without=without)) == 0


@pytest.mark.model
def test_the_node_sdk_gets_everything_that_is_offered(served: Serve) -> None:
    command = ["node", str(ROOT / "tests" / "gateway" / "check.mjs"), url_of(served)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
