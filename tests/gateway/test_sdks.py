"""What `paceline serve --openai` offers, asked for with OpenAI's own SDKs, of the default model."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.gateway import eleven_faults
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


@pytest.mark.model
async def test_control_tokens_in_messages_are_plain_text(served: Serve) -> None:
    assert await eleven_faults.run(url_of(served), served.address, only="8 ") == {}


@pytest.mark.model
def test_curl_gets_a_stream_a_schema_and_errors(served: Serve) -> None:
    url = url_of(served)

    def curl(path: str, body: str) -> tuple[int, str]:
        """(status, body) of an answer, by the command of docs/openai.md."""
        command = ["curl", "--silent", "--no-buffer", "--write-out", "\n%{http_code}", url + path]
        headers = ["-H", "Authorization: Bearer none", "-H", "Content-Type: application/json"]
        result = subprocess.run([*command, *headers, "-d", body], capture_output=True, text=True, timeout=120)
        text, _, status = result.stdout.rpartition("\n")
        return int(status), text

    ask = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 60, %s}'
    status, text = curl("/chat/completions", ask % '"stream": true')
    assert (status, text.count("data: {") > 10, text.endswith("data: [DONE]\n\n")) == (200, True, True)
    schema = '{"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}'
    status, text = curl("/chat/completions", ask % f'"response_format": {schema}')
    assert (status, json.loads(text)["choices"][0]["message"]["content"]) in ((200, '"yes"'), (200, '"no"'))
    status, text = curl("/responses", '{"input": "Hi", "max_output_tokens": 4}')
    assert (status, json.loads(text)["usage"]["output_tokens"]) == (200, 4)
    status, text = curl("/responses", '{"input": "Hi", "max_output_tokens": 10000000}')
    assert (status, json.loads(text)["error"]["param"]) == (400, "max_output_tokens")
    assert curl("/chat/completions", "{")[0] == 400
