"""Finds in /proc which process listens on a TCP port of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline.cli.scratch import is_serve

PROC = Path("/proc")
_LISTENS = "0A"  # the state of a socket in /proc/net/tcp


_SERVICES = {
    "executor_service": "executor",
    "scheduler_service": "scheduler",
    "paceline_openai": "gateway",
}
"""Paceline's processes, by the modules that they run."""


def listener(port: int, proc: Path = PROC) -> str | None:
    """The process that listens on this port, in words, with its id.

    None where the system does not tell, as for processes of other users.
    """
    sockets = {f"socket:[{inode}]" for inode in _inodes(port, proc)}
    if not sockets:
        return None
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if any(_target(link) in sockets for link in (folder / "fd").iterdir()):
                return _described(folder)
    return None


def _inodes(port: int, proc: Path) -> Iterator[str]:
    """The numbers of the sockets that listen on this port, of any address."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):  # there is no such protocol, or no /proc
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _target(link: Path) -> str:
    """What a descriptor is of; empty if it was closed meanwhile."""
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _described(folder: Path) -> str:
    """What a process is: a service of Paceline's, or a program's name. Its arguments may be secrets."""
    words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    for module, service in _SERVICES.items():
        if module in words:
            keeper = _keeper(folder)
            what = f"the {service} of a `paceline serve`" if keeper else f"a Paceline {service}"
            return f"{what} (pid {keeper or folder.name}; `paceline ps` lists what runs)"
    return f"{Path(words[0]).name or 'another program'} (pid {folder.name})"


def _keeper(folder: Path) -> str:
    """The id of the `paceline serve` that would start this process again; "" if there is none."""
    with suppress(OSError, IndexError):
        parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        if is_serve(folder.parent / parent):
            return parent
    return ""
