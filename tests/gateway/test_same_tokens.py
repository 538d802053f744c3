"""The same seed gives the same tokens by gRPC and HTTP: 200 requests of all kinds, half of them streamed."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from paceline import Tool, ToolChoice, aio

from tests.integration.scheduler.test_chat_output import PARAMETERS, tokenizer
from tests.support.adapter_stack import Operator, write_adapters
from tests.support.doctored_executor import doctored_stack
from tests.support.openai_door import Answer, Door, serving_door
from tests.unit.scheduler_shell.tool_styles import QWEN

pytestmark = pytest.mark.openai

REQUESTS = 200
KINDS = ("completion", "chat", "schema", "tools", "adapter")
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
WITHOUT_REASONING = {"enable_thinking": False}


async def test_two_hundred_requests_have_the_same_tokens_by_either_door(tmp_path: Path) -> None:
    adapters = write_adapters(tmp_path / "adapters", "ab")
    flags = ("--adapter-dir", str(adapters), "--adapter-slots", "2")
    with doctored_stack(tmp_path, executor=flags, chat_template=QWEN, tokenizer_json=tokenizer()) as stack:
        async with (
            serving_door(stack.scheduler.address) as door,
            stack.client() as client,
            Operator(stack.scheduler.address) as operator,
        ):
            for name in "ab":
                await operator.load(name)
            seen: Counter[str] = Counter()
            for start in range(0, REQUESTS, 20):
                pairs = [_pair(door, client, number) for number in range(start, start + 20)]
                for number, (http, grpc) in enumerate(await asyncio.gather(*pairs), start):
                    assert http == grpc, number
                    assert all(http)
                    seen[KINDS[number % len(KINDS)]] += 1
            assert seen == dict.fromkeys(KINDS, REQUESTS // len(KINDS))
            plain = await client.complete("x", seed=1, max_tokens=12)
            adapted = await client.complete("x", seed=1, max_tokens=12, model="a")
            assert plain.token_ids != adapted.token_ids  # an adapter has an effect


async def _pair(door: Door, client: aio.Client, number: int) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of request `number`, by HTTP and by gRPC."""
    kind = KINDS[number % len(KINDS)]
    fields: dict[str, Any] = {
        "seed": number,
        "temperature": 1.0,
        "max_tokens": 60 if kind == "tools" else 12,
        "n": 4 if number % 4 == 3 else 1,
        **({"top_k": 5} if number % 3 == 0 else {}),
    }
    streamed = bool(number // len(KINDS) % 2)
    by_http, by_grpc = fields | {"stream": streamed}, dict(fields)
    if kind == "schema":
        by_http["guided_json"] = by_grpc["schema"] = SCHEMA
    elif kind == "adapter":
        by_http["model"] = by_grpc["model"] = "ab"[number % 2]
    elif kind == "tools":
        function = {"name": "weather", "parameters": PARAMETERS}
        choice = ("auto", "required")[number % 2]
        by_http |= {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
        by_grpc |= {"tools": [Tool("weather", parameters=PARAMETERS)], "tool_choice": ToolChoice(choice)}
    if kind in ("chat", "tools") or number % 2:
        turns = [{"role": "user", "content": f"Request {number}"}]
        by_http["chat_template_kwargs"] = by_grpc["template_arguments"] = WITHOUT_REASONING
        reply = await door.chat(turns[0]["content"], return_token_ids=True, **by_http)
        ours = await client.completions(messages=turns, **by_grpc)
    else:
        reply = await door.complete(f"Request {number}", return_token_ids=True, **by_http)
        ours = await client.completions(f"Request {number}", **by_grpc)
    assert reply.status == 200, reply.body
    return _token_ids(reply, fields["n"], streamed=streamed), [list(one.token_ids) for one in ours]


def _token_ids(reply: Answer, n: int, *, streamed: bool) -> list[list[int]]:
    """Those of each choice, of all its chunks."""
    found: list[list[int]] = [[] for _ in range(n)]
    for part in reply.events if streamed else [reply.json]:
        for choice in part["choices"]:
            found[choice["index"]] += choice.get("token_ids", [])
    return found
