import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from paceline.cli.supervisor import Backoff, Child, ChildFailed

SERVICE = """
import os, pathlib, signal, sys, time
port_file, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])
print("hello", flush=True)
draft = port_file.with_suffix(".draft")
draft.write_text(str(port or 4321))
draft.rename(port_file)
signal.pause()
"""


class Said:
    """What a child said, and a way to wait for it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._news = asyncio.Condition()

    def __call__(self, name: str, line: str) -> None:
        self.lines.append(line)

        async def tell() -> None:
            async with self._news:
                self._news.notify_all()

        self._telling = asyncio.ensure_future(tell())

    async def until(self, wanted: Callable[[list[str]], bool]) -> None:
        async with asyncio.timeout(20), self._news:
            await self._news.wait_for(lambda: wanted(self.lines))


def child(tmp_path: Path, said: Said, program: str = SERVICE) -> Child:
    port_file = tmp_path / "port"
    source = textwrap.dedent(program)
    return Child(
        "child", lambda port: [sys.executable, "-c", source, str(port_file), str(port)], port_file, said
    )


def test_the_wait_doubles_to_a_limit_and_is_forgotten_after_a_good_run() -> None:
    backoff = Backoff(first_s=1.0, most_s=4.0, good_run_s=30.0)
    assert [backoff.after(0.1) for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    assert [backoff.after(30.0), backoff.after(0.1)] == [1.0, 2.0]


async def test_a_child_that_listens_says_its_port(tmp_path: Path) -> None:
    service = child(tmp_path, Said())
    await service.start(0)
    assert service.port == 4321
    await service.stop()
    assert service.pid is None


async def test_a_child_that_cannot_start_gives_its_reason(tmp_path: Path) -> None:
    service = child(tmp_path, Said(), "import sys; print('port 7 is taken'); sys.exit(3)")
    with pytest.raises(ChildFailed, match=r"exit status 3\): port 7 is taken"):
        await service.start(0)


async def test_a_dead_child_comes_back_on_its_port_and_this_is_said(tmp_path: Path) -> None:
    said = Said()
    service = child(tmp_path, said)
    await service.start(0)
    keeping = asyncio.create_task(service.keep_running())
    first = service.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await said.until(lambda lines: lines.count("hello") == 2)
    assert any("died (SIGKILL); starting it again" in line for line in said.lines)
    assert service.starts == 2
    assert service.pid not in (None, first)
    assert int((tmp_path / "port").read_text()) == service.port == 4321
    await service.stop()
    await keeping


async def test_stopping_is_no_death(tmp_path: Path) -> None:
    said = Said()
    service = child(tmp_path, said)
    await service.start(0)
    keeping = asyncio.create_task(service.keep_running())
    await service.stop()
    await asyncio.wait_for(keeping, 5)
    assert service.starts == 1
    assert not any("died" in line for line in said.lines)


async def test_a_child_that_ignores_sigterm_can_be_killed(tmp_path: Path) -> None:
    service = child(
        tmp_path, Said(), "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVICE
    )
    await service.start(0)
    stopping = asyncio.create_task(service.stop())
    service.kill()
    await asyncio.wait_for(stopping, 5)


async def test_a_very_long_line_comes_in_pieces(tmp_path: Path) -> None:
    said = Said()
    service = child(tmp_path, said, "print('x' * 300_000)")
    with pytest.raises(ChildFailed):
        await service.start(0)
    assert sum(len(line) for line in said.lines) == 300_000


async def test_a_child_is_out_of_reach_of_the_terminals_ctrl_c(tmp_path: Path) -> None:
    service = child(tmp_path, Said())
    await service.start(0)
    assert service.pid is not None
    assert os.getsid(service.pid) != os.getsid(0)
    await service.stop()
