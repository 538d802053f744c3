"""What `paceline gateway` shows: as little as `serve`, but whether requests are taken."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator

import pytest
from paceline.cli.gateway import gateway, tell_readiness
from paceline.cli.serve import serve


def test_gateway_and_serve_show_warnings_unless_told_otherwise() -> None:
    levels = [inspect.signature(command).parameters["log_level"].default for command in (gateway, serve)]
    assert levels == ["warning", "warning"]


async def told(answers: Iterator[bool], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines about readiness, up to the last answer."""

    async def ready() -> bool:
        try:
            return next(answers)
        except StopIteration:
            raise asyncio.CancelledError from None

    with pytest.raises(asyncio.CancelledError):
        await tell_readiness(ready, ["a:1", "b:2"], poll_s=0)
    return capsys.readouterr().err.splitlines()


async def test_readiness_is_told_when_it_changes(capsys: pytest.CaptureFixture[str]) -> None:
    first, lost, again = await told(iter([False, True, True, False, False, True]), capsys)
    assert first == again == "Ready: a scheduler serves."
    assert lost.startswith("paceline: warning: no scheduler serves at a:1, b:2: requests are refused")


async def test_a_gateway_that_finds_no_scheduler_says_so_once_after_a_while(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await told(iter([False] * 5), capsys) == []
    [line] = await told(iter([False] * 50), capsys)
    assert "no scheduler serves at a:1, b:2" in line
