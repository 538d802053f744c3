"""Who has a port: as far as /proc tells, and silence elsewhere."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
from paceline.cli.listener import listener


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
def test_the_process_that_listens_is_named_with_its_id() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = listener(taken.getsockname()[1])
    assert found is not None
    assert found.endswith(f" (pid {os.getpid()})")


def proc_with(folder: Path, command: bytes, state: str = "0A", inode: int = 77, table: str = "tcp") -> Path:
    """A /proc of one process, 42, whose descriptor 3 is a socket, and one socket of port 0xC383."""
    (folder / "net").mkdir()
    (folder / "net" / table).write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        f"   0: 0100007F:C383 00000000:0000 {state} 00000000:00000000 00:00000000 00000000  0  0 {inode} 1\n"
    )
    (folder / "42" / "fd").mkdir(parents=True)
    (folder / "42" / "fd" / "3").symlink_to("socket:[77]")
    (folder / "42" / "cmdline").write_bytes(command)
    return folder


@pytest.mark.parametrize(
    ("table", "command", "said"),
    [
        ("tcp", b"/usr/bin/nginx\0--password=secret\0", "nginx (pid 42)"),
        (
            "tcp6",
            b"python\0-m\0scheduler_service\0",
            "a Paceline scheduler (pid 42; `paceline ps` lists what runs)",
        ),
        ("tcp", b"", "another program (pid 42)"),
    ],
)
def test_a_service_of_ours_is_called_so_and_arguments_are_not_shown(
    table: str, command: bytes, said: str, tmp_path: Path
) -> None:
    assert listener(0xC383, proc_with(tmp_path, command, table=table)) == said


def test_of_a_service_that_serve_keeps_running_the_id_is_serves(tmp_path: Path) -> None:
    proc = proc_with(tmp_path, b"python\0-m\0scheduler_service\0")
    (proc / "42" / "stat").write_text("42 (python (1)) S 41 42 42 0 -1")
    (proc / "41").mkdir()
    (proc / "41" / "cmdline").write_bytes(b"python\0/bin/paceline\0serve\0--port\0")
    told = "the scheduler of a `paceline serve` (pid 41; `paceline ps` lists what runs)"
    assert listener(0xC383, proc) == told


def test_what_the_system_does_not_tell_is_not_guessed(tmp_path: Path) -> None:
    assert listener(0xC383, tmp_path) is None  # no /proc
    (tmp_path / "connected").mkdir()
    assert listener(0xC383, proc_with(tmp_path / "connected", b"nginx\0", state="01")) is None
    (tmp_path / "foreign").mkdir()
    assert listener(0xC383, proc_with(tmp_path / "foreign", b"nginx\0", inode=78)) is None
