"""LangChain, litellm, LlamaIndex and the AI SDK of Node against the OpenAI API; make test-openai-frameworks.

usage: python -m tests.gateway.frameworks PYTHON NODE_MODULES    (PYTHON: of an environment that has them)
       PYTHON tests/gateway/frameworks.py URL                    (that environment asks a server)

A small random model whose template has tools. Prints a line for each check; exit status 1 if one failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = "oracle"
TEXTS = ["The sky is blue.", "Two and two are four."]
SCHEMA: dict[str, Any] = {
    "title": "city",
    "description": "a city",
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


def langchain(url: str) -> None:
    """Chats, streams, schemas, calls and their results, vectors."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    chat = ChatOpenAI(base_url=url, api_key="none", model=MODEL, max_tokens=200, seed=1, extra_body=QUIET)
    answer = chat.invoke("Hello")
    assert answer.usage_metadata["output_tokens"] > 0
    streamed = "".join(str(chunk.content) for chunk in chat.stream("Hello"))
    assert streamed == answer.content
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(SCHEMA, method=method).invoke("Hello")
        assert set(found) == {"city"}, found
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    called = chat.bind_tools([tool], tool_choice="weather", parallel_tool_calls=False).invoke("Hello")
    [call] = called.tool_calls
    assert set(call["args"]) == {"city"}
    result = ToolMessage("20 C", tool_call_id=call["id"])
    chat.bind_tools([tool]).invoke([HumanMessage("Hello"), called, result])
    assert len(chat.batch(["a", "b", "c"])) == 3
    responses = ChatOpenAI(
        base_url=url,
        api_key="none",
        model=MODEL,
        max_tokens=40,
        use_responses_api=True,
        store=False,
        extra_body=QUIET,
    )
    assert responses.invoke("Hello").usage_metadata["output_tokens"] > 0
    vectors = OpenAIEmbeddings(base_url=url, api_key="none", model=MODEL, check_embedding_ctx_length=False)
    found_vectors = vectors.embed_documents(TEXTS)
    assert [any(one) for one in found_vectors] == [True, True]
    assert found_vectors[0] != found_vectors[1]


def litellm(url: str) -> None:
    """Chats, streams, schemas, calls, vectors, errors."""
    import litellm as lite

    given: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "api_base": url,
        "api_key": "none",
        "max_tokens": 200,
        "seed": 1,
    }
    given |= {"messages": [{"role": "user", "content": "Hello"}], "extra_body": QUIET}
    answer = lite.completion(**given)
    pieces = [chunk.choices[0].delta.content or "" for chunk in lite.completion(**given, stream=True)]
    assert "".join(pieces) == (answer.choices[0].message.content or "")
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    found = lite.completion(**given, response_format=wanted)
    assert set(json.loads(found.choices[0].message.content)) == {"city"}
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    called = lite.completion(**given, tools=[tool], tool_choice="required").choices[0].message
    assert called.tool_calls[0].function.name == "weather"
    turns = [*given["messages"], called.model_dump()]
    turns += [{"role": "tool", "tool_call_id": one.id, "content": "20 C"} for one in called.tool_calls]
    lite.completion(**{**given, "messages": turns}, tools=[tool])
    vectors = lite.embedding(model=f"openai/{MODEL}", api_base=url, api_key="none", input=TEXTS)
    assert [any(one["embedding"]) for one in vectors.data] == [True, True]
    refused = ""
    try:
        lite.completion(**{**given, "max_tokens": 10**9})
    except lite.BadRequestError as error:
        refused = str(error)
    assert "max_tokens" in refused


def llamaindex(url: str) -> None:
    """Chats, streams, completions, vectors."""
    from llama_index.core.llms import ChatMessage
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.llms.openai_like import OpenAILike

    given: dict[str, Any] = {"api_base": url, "api_key": "none", "model": MODEL, "max_tokens": 60}
    given["additional_kwargs"] = {"seed": 1, "extra_body": QUIET}
    chat = OpenAILike(**given, is_chat_model=True)
    turns = [ChatMessage(role="user", content="Hello")]
    whole = chat.chat(turns).message.content
    assert "".join(one.delta or "" for one in chat.stream_chat(turns)) == whole
    del given["additional_kwargs"]["extra_body"]
    text = OpenAILike(**given, is_chat_model=False)
    assert "".join(one.delta or "" for one in text.stream_complete("Once")) == text.complete("Once").text
    vectors = OpenAILikeEmbedding(model_name=MODEL, api_base=url, api_key="none").get_text_embedding_batch(
        TEXTS
    )
    assert [any(one) for one in vectors] == [True, True]


CHECKS: tuple[Callable[[str], None], ...] = (langchain, litellm, llamaindex)
NODE = """
import assert from 'node:assert/strict';
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';
const [modules, url] = process.argv.slice(-2);
const require = createRequire(modules + '/');
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateText, streamText, embedMany } = await load('ai');
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible');
const api = createOpenAICompatible({ name: 'paceline', baseURL: url, apiKey: 'none', includeUsage: true });
const ask = { model: api('oracle'), prompt: 'Hello', maxOutputTokens: 40, seed: 1 };
const whole = await generateText(ask);
let text = '';
for await (const piece of streamText(ask).textStream) text += piece;
assert.equal(text, whole.text);
assert.ok(whole.usage.outputTokens > 0);
const { embeddings } = await embedMany({ model: api.textEmbeddingModel('oracle'), values: ['one', 'two'] });
assert.deepEqual(embeddings.map((one) => one.some((value) => value !== 0)), [true, true]);
"""


def check_all(url: str) -> int:
    """Run all checks of this environment; returns how many failed."""
    failed = 0
    for one in CHECKS:
        try:
            one(url)
            verdict = "passed"
        except Exception:
            failed += 1
            verdict = "FAILED\n" + traceback.format_exc(limit=-4)
        print(f"{one.__name__:12s} {verdict}", flush=True)
    return failed


def main(python: str, modules: str) -> int:
    """Start a stack with a door, and have both environments ask it."""
    from tests.integration.scheduler.test_chat_output import tokenizer
    from tests.support.doctored_executor import doctored_stack
    from tests.support.processes import ServiceProcess
    from tests.unit.scheduler_shell.tool_styles import QWEN

    with (
        tempfile.TemporaryDirectory() as name,
        doctored_stack(Path(name), chat_template=QWEN, tokenizer_json=tokenizer()) as stack,
    ):
        door = ServiceProcess(
            "paceline_openai", ["--scheduler", stack.scheduler.address], Path(name) / "door"
        )
        url = f"http://{door.address}/v1"
        try:
            local = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it looks for prices elsewhere
            asked = subprocess.run([python, __file__, url], timeout=300, check=False, env=local)
            quiet = {**os.environ, "AI_SDK_LOG_WARNINGS": "false"}
            command = ["node", "--input-type=module", "-e", NODE, "--", str(Path(modules).resolve()), url]
            node = subprocess.run(command, timeout=120, check=False, env=quiet)
            print(f"AI SDK       {'FAILED' if node.returncode else 'passed'}")
        finally:
            door.kill()
    return 1 if asked.returncode or node.returncode else 0


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(1 if check_all(sys.argv[1]) else 0)
    sys.exit(main(sys.argv[1], sys.argv[2]))
