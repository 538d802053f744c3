import asyncio
import os
import select
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paceline.cli.restarts import Restarts
from paceline.cli.supervisor import Child, ChildFailed
from paceline.cli.watch import OnServing, or_stopped

from tests.support.processes import stop

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
        async with asyncio.timeout(60), self._news:
            await self._news.wait_for(lambda: wanted(self.lines))


def child(tmp_path: Path, said: Said, program: str = SERVICE, **options: Any) -> Child:
    port_file = tmp_path / "port"
    source = textwrap.dedent(program)
    command = [sys.executable, "-c", source, str(port_file)]
    return Child("child", lambda port: [*command, str(port)], port_file, said, **options)


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


SAYS_ITS_SECRETS = "import sys; print('secrets:', sys.stdin.readline().strip(), flush=True)\n" + SERVICE


async def test_secrets_are_written_at_every_start_and_shown_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "of-clients")
    said = Said()
    service = child(tmp_path, said, SAYS_ITS_SECRETS, secrets=b"sesame\n")
    await service.start(0)
    keeping = asyncio.create_task(service.keep_running())
    first = service.pid
    assert first is not None
    for place in ("cmdline", "environ"):
        shown = await asyncio.to_thread(Path(f"/proc/{first}/{place}").read_bytes)
        assert b"sesame" not in shown
        assert b"of-clients" not in shown
    os.kill(first, signal.SIGKILL)
    await said.until(lambda lines: lines.count("secrets: sesame") == 2)
    await service.stop()
    await keeping


SAYS_THAT_IT_IS_READY = "import os, sys; print('ready', os.getpid(), flush=True)\n" + SAYS_ITS_SECRETS


def ready(lines: list[str]) -> list[int]:
    """Process ids of the runs that were begun."""
    return [int(line.split()[1]) for line in lines if line.startswith("ready ")]


async def with_a_spare(directory: Path) -> tuple[Said, Child, asyncio.Task[None]]:
    """A process that runs, and a spare one, both of which are ready."""
    said = Said()
    service = child(directory, said, SAYS_THAT_IT_IS_READY, secrets=b"sesame\n", has_spare=True)
    await service.start(0)
    keeping = asyncio.create_task(service.keep_running())
    await said.until(lambda lines: len(ready(lines)) == 2)
    return said, service, keeping


async def test_a_spare_process_takes_the_place_of_one_that_has_ended_and_is_replaced(tmp_path: Path) -> None:
    said, service, keeping = await with_a_spare(tmp_path)
    first, spare = ready(said.lines)
    assert (service.pid, said.lines.count("secrets: sesame")) == (first, 1)
    os.kill(first, signal.SIGKILL)
    await said.until(lambda lines: lines.count("secrets: sesame") == 2)
    assert service.pid == spare
    assert any("died (SIGKILL); another takes its place" in line for line in said.lines)
    await said.until(lambda lines: len(ready(lines)) == 3)
    os.kill(ready(said.lines)[2], signal.SIGKILL)
    await said.until(lambda lines: len(ready(lines)) == 4)
    left = os.pidfd_open(ready(said.lines)[3])
    await service.stop()
    await keeping
    await asyncio.to_thread(select.select, [left], [], [])  # the spare process ends too
    os.close(left)


async def test_a_spare_process_that_is_stopped_by_a_signal_takes_no_place(tmp_path: Path) -> None:
    said, service, keeping = await with_a_spare(tmp_path)
    first, spare = ready(said.lines)
    stop(spare)
    os.kill(first, signal.SIGKILL)
    await said.until(lambda lines: lines.count("secrets: sesame") == 2)
    assert service.pid not in (None, first, spare)
    await service.stop()
    await keeping


async def never(pid: int, _on_serving: OnServing) -> str:
    await asyncio.Event().wait()
    return ""


when_stopped = or_stopped(never)


async def test_a_frozen_child_is_ended_and_started_again(tmp_path: Path) -> None:
    said = Said()
    service = child(tmp_path, said, watch=when_stopped)
    await service.start(0)
    first = service.pid
    assert first is not None
    stop(first)
    keeping = asyncio.create_task(service.keep_running())
    await said.until(lambda lines: lines.count("hello") == 2)
    assert any(
        "frozen: stopped by a signal; died (SIGKILL); starting it again" in line for line in said.lines
    )
    assert service.pid != first
    await service.stop()
    await keeping


async def test_a_child_that_freezes_before_it_listens_has_failed(tmp_path: Path) -> None:
    stops_itself = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)\n" + SERVICE
    service = child(tmp_path, Said(), stops_itself, watch=when_stopped)
    with pytest.raises(ChildFailed, match=r"ended \(frozen: stopped by a signal; SIGKILL\)"):
        await asyncio.wait_for(service.start(0), 60)


async def test_a_child_that_freezes_while_it_ends_is_ended(tmp_path: Path) -> None:
    service = child(tmp_path, Said(), watch=when_stopped)
    await service.start(0)
    assert service.pid is not None
    stop(service.pid)
    await asyncio.wait_for(service.stop(), 60)


LEAVES_ONE_BEHIND = (
    "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()'],"
    " stdin=subprocess.PIPE).pid, flush=True)\n" + SERVICE
)


async def test_what_a_child_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    said = Said()
    service = child(tmp_path, said, LEAVES_ONE_BEHIND)
    await service.start(0)
    await said.until(lambda lines: "hello" in lines)
    left = os.pidfd_open(int(said.lines[0]))
    stop(int(said.lines[0]))  # it can't end by itself
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(left, ended.set)
    await service.stop()
    await asyncio.wait_for(ended.wait(), 60)
    asyncio.get_running_loop().remove_reader(left)
    os.close(left)


async def test_a_crash_loop_is_said_with_the_last_words_and_given_up(tmp_path: Path) -> None:
    said = Said()
    marker = tmp_path / "second"
    program = (
        f"import pathlib, sys; second = pathlib.Path({str(marker)!r})\n"
        "again = second.exists(); second.touch()\n"
        "if again: print('no memory left'); sys.exit(1)\n" + SERVICE
    )
    service = child(tmp_path, said, program, watch=never, restarts=Restarts(first_s=0.01, max_s=0.02))
    await service.start(0)
    assert service.pid is not None
    os.kill(service.pid, signal.SIGKILL)
    with pytest.raises(
        ChildFailed, match=r"10 starts in a row never served; .*exit status 1\): no memory left"
    ):
        await service.keep_running()
    fifth = next(line for line in said.lines if "died 5 times in" in line)
    assert "is not serving" in fifth
    assert fifth.endswith("no memory left")


async def test_stopping_is_no_death(tmp_path: Path) -> None:
    said = Said()
    service = child(tmp_path, said)
    await service.start(0)
    keeping = asyncio.create_task(service.keep_running())
    await service.stop()
    await asyncio.wait_for(keeping, 60)
    assert service.starts == 1
    assert not any("died" in line for line in said.lines)


async def test_a_child_that_ignores_sigterm_can_be_killed(tmp_path: Path) -> None:
    service = child(
        tmp_path, Said(), "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVICE
    )
    await service.start(0)
    stopping = asyncio.create_task(service.stop())
    service.kill()
    await asyncio.wait_for(stopping, 60)


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
