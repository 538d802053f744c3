"""The temporary directories of stacks: one for each, with its services' sockets and port files."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_PREFIX = "paceline-"
_PID = "pid"  # the file with the id of the process that keeps the stack running
_TIMEOUT_S = 3.0
_NAMED = 4  # stacks in a sentence
_MAX_BYTES = 80  # longer paths leave no room for a socket's name; the system's limit is 108


@dataclass(frozen=True, slots=True)
class ChildFiles:
    """The files of one service: its port file, and the Unix socket on which it answers its parent."""

    port: Path
    socket: Path

    @classmethod
    def of(cls, name: str, directory: Path) -> ChildFiles:
        """The files of service `name` in `directory`, which must be private to this user."""
        return cls(directory / name, directory / f"{name}.socket")

    @property
    def flags(self) -> list[str]:
        """The service's flags that name the files."""
        return ["--port-file", str(self.port), "--local-socket", str(self.socket)]


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A context manager: a new directory, private to this user, removed at the end of the block.

    Its path is short enough for Unix sockets in it.
    """
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=_parent()) as name:
        (Path(name) / _PID).write_text(str(os.getpid()))
        yield Path(name)


def stack_directories() -> Iterator[tuple[int, Path]]:
    """This user's directories of stacks, each with the id of its process. Killed processes leave theirs.

    Directories of other users are left out: anybody can make one of such a name, and answer in it.
    """
    for path in _parent().glob(f"{_PREFIX}*"):
        with suppress(OSError, ValueError):
            about = path.lstat()
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid():
                yield int((path / _PID).read_text()), path


def what_runs() -> str:
    """A sentence for who found nobody at an address: where this user's stacks are, and which are starting."""
    at = set(_served().values())
    parts = [f"port {port} of this machine is served" for port in sorted(at)[:_NAMED]]
    parts += [f"process {pid} is starting, wait until it serves" for pid in starting()[:_NAMED]]
    return f"Found by `paceline ps`: {'; '.join(parts)}" if parts else "`paceline ps` finds nothing here"


def starting() -> list[int]:
    """Processes of `paceline serve` that take no requests yet: this user's, and where Linux lists them.

    Those with another temporary directory are left out: theirs does not tell when they serve.
    """
    served, here = _served(), os.environ.get("TMPDIR", "")
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if not is_serve(process):
                continue
            # Only its user may read it.
            environment = (process / "environ").read_bytes().split(b"\0")
            there = next((one[7:] for one in environment if one.startswith(b"TMPDIR=")), b"")
            if os.fsdecode(there) == here and int(process.name) not in served:
                found.append(int(process.name))
    return sorted(found)


def is_serve(process: Path) -> bool:
    """Whether this process of /proc is a `paceline serve`. Raises OSError if it has ended."""
    words = (process / "cmdline").read_bytes().split(b"\0")
    return any(one.endswith(b"paceline") and two == b"serve" for one, two in pairwise(words))


def _served() -> dict[int, int]:
    """The port at which each stack's process takes requests: of several models, the router's."""
    ports = ((pid, front_files(directory)) for pid, directory in stack_directories())
    found = {}
    for pid, files in sorted(ports, key=lambda one: one[1].port.name == "router"):  # its port is the last one
        if (port := port_of(files)) is not None:
            found[pid] = port
    return found


def front_files(directory: Path) -> ChildFiles:
    """Those of a stack's service that takes requests: the scheduler, or the router of several models."""
    return ChildFiles.of("router" if (directory / "router").exists() else "scheduler", directory)


def port_of(files: ChildFiles) -> int | None:
    """Where the stack takes requests; None: it does not."""
    try:
        port = int(files.port.read_text())
    except (OSError, ValueError):
        return None
    return port if _listens(files.socket) else None


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_TIMEOUT_S)
        return client.connect_ex(os.fspath(path)) == 0


def _parent() -> Path:
    directory = tempfile.gettempdir()
    return Path(directory if len(os.fsencode(directory)) < _MAX_BYTES else "/tmp")
