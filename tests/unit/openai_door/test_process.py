"""The gateway as a process, which schedulers it uses, and as a part of an application."""

from __future__ import annotations

from typing import Any

import pytest
from paceline.aio import Client
from paceline_openai import Gateway
from paceline_openai import __main__ as process
from service_kit import logs


class _Made(Exception):
    """The client was made."""


@pytest.mark.parametrize(("host", "directory"), [("127.0.0.1", "safe"), ("0.0.0.0", "off")])
def test_beyond_loopback_only_schedulers_that_refuse_strangers_are_used(
    host: str, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def client(*_: object, **options: Any) -> None:
        given.update(options)
        raise _Made

    monkeypatch.setattr(process, "Client", client)
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # of this process
    with pytest.raises(_Made):
        process.main(["--scheduler", "127.0.0.1:1", "--host", host, "--insecure"])
    assert given["directory"] == directory


@pytest.mark.parametrize(("path", "status"), [("/llm/liveness", 200), ("/liveness", 200), ("/llm/llm", 404)])
async def test_an_application_may_mount_it_anywhere(path: str, status: int) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("there is no body")

    async with Client("127.0.0.1:9") as client:
        scope = {"type": "http", "method": "GET", "path": path, "root_path": "/llm", "headers": []}
        await Gateway(client)(scope, receive, send)
    assert sent[0]["status"] == status
