"""What OpenAI's own Python SDK reads and sends, of a service without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.check import WEATHER, Service, tools
from tests.integration.scheduler.test_chat_output import tokenizer
from tests.support.doctored_executor import doctored_stack
from tests.support.openai_door import serving_door
from tests.support.serve import serving
from tests.unit.openai_door.test_fields import OPENAIS
from tests.unit.scheduler_shell.tool_styles import QWEN

pytestmark = pytest.mark.openai


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


async def test_the_sdk_reads_calls_of_a_model_whose_template_has_tools(tmp_path: Path) -> None:
    import openai

    with doctored_stack(tmp_path, chat_template=QWEN, tokenizer_json=tokenizer()) as stack:
        async with serving_door(stack.scheduler.address) as door:
            url = f"http://127.0.0.1:{door.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
                thoughtless = {"chat_template_kwargs": {"enable_thinking": False}}
                await tools(Service(api, "oracle", more={"extra_body": thoughtless}))


async def test_the_sdk_reads_responses_whole_and_streamed(tmp_path: Path) -> None:
    import openai

    with doctored_stack(tmp_path, chat_template=QWEN, tokenizer_json=tokenizer()) as stack:
        async with serving_door(stack.scheduler.address) as door:
            url = f"http://127.0.0.1:{door.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
                weather: Any = WEATHER["function"]
                fields: dict[str, Any] = {
                    "model": "oracle",
                    "input": "hello",
                    "tools": [{"type": "function", "strict": True, **weather}],
                    "tool_choice": "required",
                    "extra_body": {"seed": 3},
                    "max_output_tokens": 400,
                    "store": False,
                }
                whole = await api.responses.create(**fields)
                assert whole.status == "completed"
                calls = [one for one in whole.output if one.type == "function_call"]
                assert {one.name for one in calls} == {"weather"}
                assert all(set(json.loads(one.arguments)) == {"city"} for one in calls)
                async with api.responses.stream(**fields) as stream:
                    kinds = [event.type async for event in stream]
                    final = await stream.get_final_response()
                assert kinds[0] == "response.created"
                assert "response.function_call_arguments.delta" in kinds
                assert kinds[-1] == "response.completed"
                assert [one.type for one in final.output] == [one.type for one in whole.output]
                assert final.usage is not None
                assert whole.usage is not None
                assert final.usage.output_tokens == whole.usage.output_tokens
                found = [one.arguments for one in final.output if one.type == "function_call"]
                assert found == [one.arguments for one in calls]
                back: list[Any] = [{"role": "user", "content": "hello"}]
                back += [one for one in whole.model_dump()["output"] if one["type"] != "reasoning"]
                for one in calls:
                    back.append({"type": "function_call_output", "call_id": one.call_id, "output": "20 C"})
                more = await api.responses.create(**{**fields, "input": back})
                assert more.usage.input_tokens > whole.usage.input_tokens
                with pytest.raises(openai.BadRequestError) as refused:
                    await api.responses.create(model="oracle", input="x", previous_response_id="resp_1")
                assert refused.value.param == "previous_response_id"


def test_the_fields_of_the_sdks_types_are_the_known_ones() -> None:
    from openai.types import completion_create_params, embedding_create_params
    from openai.types.chat import completion_create_params as chat_create_params
    from openai.types.responses import response_create_params

    found = {
        "/v1/chat/completions": chat_create_params.CompletionCreateParamsBase,
        "/v1/completions": completion_create_params.CompletionCreateParamsBase,
        "/v1/responses": response_create_params.ResponseCreateParamsBase,
        "/v1/embeddings": embedding_create_params.EmbeddingCreateParams,
    }
    for path, params in found.items():
        assert set(params.__annotations__) - {"stream"} == set(OPENAIS[path].split()) - {"stream"}
