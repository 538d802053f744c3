"""What `drain` asks of an executor."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from paceline import ExecutorClient, aio
from paceline.executor.v1 import executor_pb2 as pb


@pytest.mark.parametrize(("wait_s", "timeout_ms"), [(None, 0), (0.0, 1), (2.5, 2500)])
def test_a_drain_waits_as_long_as_it_is_told_and_no_wait_is_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, wait_s: float | None, timeout_ms: int
) -> None:
    asked: list[pb.DrainRequest] = []

    def call(client: object, method: object, request: pb.DrainRequest, timeout_s: float | None) -> Any:
        asked.append(request)
        return pb.DrainResponse(sequences=3)

    async def call_later(*arguments: Any) -> Any:
        return call(*arguments)

    async def drain() -> int:
        async with aio.ExecutorClient("127.0.0.1:1") as client:
            return await client.drain(wait_s=wait_s)

    monkeypatch.setattr(ExecutorClient, "_call", call)
    monkeypatch.setattr(aio.ExecutorClient, "_call", call_later)
    with ExecutorClient("127.0.0.1:1") as client:
        assert client.drain(wait_s=wait_s) == 3
    assert asyncio.run(drain()) == 3
    assert [request.timeout_ms for request in asked] == [
        timeout_ms,
        timeout_ms,
    ]  # 0: without a limit of its own
