"""Paceline's own gateway, asked with OpenAI's own SDK, of the default model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.gateway.check import run
from tests.model.default_model import default_model
from tests.support.openai_door import serving_door
from tests.support.serve import serving
from tests.unit.openai_door.test_fields import OPENAIS

pytestmark = pytest.mark.openai

NOT_HERE = {
    "responses",  # /v1/responses is smg's alone
    "tools",  # the default model's template has none, and smg has some of its own
    "embeddings",  # lists of token ids are taken here
    "embeddings_of_a_list_are_one_of_its_texts_joined",  # and lists of texts are as many vectors
    "wrong_parameters_answer_400_with_the_field",  # bounds are the scheduler's
}


@pytest.mark.model
async def test_the_python_sdk_gets_what_both_gateways_offer(tmp_path: Path) -> None:
    with serving(tmp_path, "--model", str(default_model()), backend="torch") as serve:
        async with serving_door(serve.address) as door:
            url = f"http://127.0.0.1:{door.port}/v1"
            assert await run(url, "", serve.address, "", without=NOT_HERE) == 0


async def test_the_sdk_reads_vectors_of_lists_and_what_is_refused(tmp_path: Path) -> None:
    import openai

    with serving(tmp_path) as serve:
        async with serving_door(serve.address) as door:
            url = f"http://127.0.0.1:{door.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
                reply = await api.embeddings.create(model="oracle", input=["a", "b"])  # asks for base64
                assert [len(one.embedding) > 4 and any(one.embedding) for one in reply.data] == [True, True]
                with pytest.raises(openai.BadRequestError) as refused:
                    await api.completions.create(model="oracle", prompt="x", suffix="y")
                assert refused.value.param == "suffix"
                with pytest.raises(openai.NotFoundError):
                    await api.completions.create(model="another", prompt="x")


def test_the_fields_of_the_sdks_types_are_the_known_ones() -> None:
    from openai.types import completion_create_params, embedding_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    found = {
        "/v1/chat/completions": chat_create_params.CompletionCreateParamsBase,
        "/v1/completions": completion_create_params.CompletionCreateParamsBase,
        "/v1/embeddings": embedding_create_params.EmbeddingCreateParams,
    }
    for path, params in found.items():
        assert set(params.__annotations__) - {"stream"} == set(OPENAIS[path].split()) - {"stream"}


def test_a_door_serves_as_a_process(tmp_path: Path) -> None:
    assert asyncio.run(_liveness(tmp_path)) == 200


async def _liveness(directory: Path) -> int:
    import sys

    from tests.support.checkout import environment

    port_file = directory / "port"
    command = [sys.executable, "-m", "paceline_openai", "--scheduler=127.0.0.1:9", f"--port-file={port_file}"]
    process = await asyncio.create_subprocess_exec(*command, env=environment())
    try:
        async with asyncio.timeout(60):
            while not port_file.exists() or not port_file.read_text().strip():
                assert process.returncode is None
                await asyncio.sleep(0.01)
        port = int(port_file.read_text())
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /liveness HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return int(answer.split()[1])
    finally:
        process.terminate()
        assert await process.wait() == 0
