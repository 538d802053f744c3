"""The same seed gives the same tokens by gRPC and by HTTP: 200 requests of each kind that both have."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from paceline import aio

from tests.support.openai_door import Door, serving_door
from tests.support.stack import oracle_stack

pytestmark = pytest.mark.slow

REQUESTS = 200
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


async def test_two_hundred_requests_have_the_same_tokens_by_either_door(tmp_path: Path) -> None:
    with oracle_stack(tmp_path) as stack:
        async with serving_door(stack.scheduler.address) as door, stack.client() as client:
            pairs = [_pair(door, client, number) for number in range(REQUESTS)]
            for start in range(0, REQUESTS, 20):
                for http, grpc in await asyncio.gather(*pairs[start : start + 20]):
                    assert http == grpc
                    assert all(http)


async def _pair(door: Door, client: aio.Client, number: int) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of request `number`, by HTTP and by gRPC."""
    fields: dict[str, Any] = {
        "seed": number,
        "temperature": 1.0,
        "max_tokens": 12,
        "n": 4 if number % 4 == 3 else 1,
        **({"top_k": 5} if number % 3 == 0 else {}),
    }
    content, constrained = f"Request {number}", number % 5 == 0
    guided: dict[str, Any] = {"guided_json": SCHEMA} if constrained else {}
    schema: dict[str, Any] = {"schema": SCHEMA} if constrained else {}
    if number % 2:
        reply = await door.chat(content, return_token_ids=True, **fields, **guided)
        ours = await client.completions(messages=[{"role": "user", "content": content}], **fields, **schema)
    else:
        reply = await door.complete(content, return_token_ids=True, **fields, **guided)
        ours = await client.completions(content, **fields, **schema)
    assert reply.status == 200, reply.body
    return [one["token_ids"] for one in reply.json["choices"]], [list(one.token_ids) for one in ours]
