"""The temporary directories of stacks: one for each, with its services' sockets and port files."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "paceline-"
_PID = "pid"  # the file with the id of the process that keeps the stack running
_MAX_BYTES = 80  # longer paths leave no room for a socket's name; the system's limit is 108


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


def _parent() -> Path:
    directory = tempfile.gettempdir()
    return Path(directory if len(os.fsencode(directory)) < _MAX_BYTES else "/tmp")
