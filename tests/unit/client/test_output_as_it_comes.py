"""Commands that take long print into a pipe as they go, and keep nothing back until their end."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from paceline.cli import bench, status
from paceline.cli.app import app
from rich.console import Console
from typer.testing import CliRunner

from tests.unit.client.conftest import Served

LOAD = ["--prompt-tokens", "6", "--new-tokens", "3"]


class Pipe(io.RawIOBase):
    """What a reader of the pipe has: `observe()` is called at each piece of text that arrives."""

    def __init__(self, observe: Callable[[], int] = lambda: 0) -> None:
        self.arrived: list[tuple[int, str]] = []
        self._observe = observe

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.arrived.append((self._observe(), bytes(data).decode()))
        return len(data)

    def console(self) -> Console:
        """A console that writes here through a buffer of blocks, as stdout of a pipe."""
        return Console(file=io.TextIOWrapper(io.BufferedWriter(cast(Any, self), 1 << 16), encoding="utf-8"))


@pytest.mark.parametrize("how", [[], ["--speculation"]], ids=["plain", "speculation"])
async def test_bench_prints_each_row_before_the_next_is_measured(
    served: Served, how: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = Pipe(lambda: len(served.fake.requests))
    monkeypatch.setattr(bench, "console", pipe.console())
    command = ["bench", "-c", "1,2", "--rounds", "1", "--no-warmup", *LOAD]
    result = await asyncio.to_thread(CliRunner().invoke, app, [*command, *how, "-a", served.address])
    assert result.exit_code == 0, result.output
    sent = {line.split()[0]: sent for sent, line in pipe.arrived if line.split()}
    assert sent["streams"] == sent["1"] < sent["2"] == len(served.fake.requests)


async def test_bench_keeps_stdout_for_the_json(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, rows = Pipe(), Pipe()
    monkeypatch.setattr(bench, "console", pipe.console())
    monkeypatch.setattr(bench, "stderr", rows.console())
    command = ["bench", "-c", "1", "--rounds", "1", *LOAD, "--json", "-", "-a", served.address]
    result = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert result.stdout.startswith("{")
    assert not pipe.arrived
    assert any("streams" in text for _, text in rows.arrived)


async def test_status_prints_what_it_watches_each_time_it_looks(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def wait(interval_s: float) -> None:
        waits.append(interval_s)
        if len(waits) == 3:
            raise KeyboardInterrupt

    pipe = Pipe(lambda: len(waits))
    monkeypatch.setattr(status, "console", pipe.console())
    monkeypatch.setattr("paceline.cli.status.time", SimpleNamespace(sleep=wait))
    result = await asyncio.to_thread(CliRunner().invoke, app, ["status", "--watch", "-a", served.address])
    assert result.exit_code == 0, result.output
    assert [waited for waited, text in pipe.arrived if "state" in text] == [0, 1, 2]
