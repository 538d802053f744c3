"""Reads small files that a user names: secrets, certificates, settings. Tells when one has changed.

A pipe without a writer or a device would hang a start, or fill the memory; a directory gives an odd error.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

MAX_BYTES = 1 << 20
"""Far above any token, key, chain of certificates or file of settings."""


def read_bounded(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file of at most `max_bytes` bytes, or of the one that a link leads to.

    Raises OSError, with `filename` and `strerror`, for anything else. Never waits for a pipe's writer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    with open(descriptor, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes} bytes", str(path))
    return content


FileStamp = tuple[int, ...]


def stamp(path: Path) -> FileStamp | None:
    """Values that change when the file does; None if they can't be read."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class ChangedFiles:
    """Whether files are others than those that were taken last. Several threads may ask at once."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._taken = self._look()
        self._failed: Sequence[FileStamp | None] | None = None

    def look(self) -> Sequence[FileStamp | None] | None:
        """The stamps of what is there now; None: of what was taken."""
        found = self._look()
        return None if found == self._taken else found

    def take(self, found: Sequence[FileStamp | None]) -> None:
        """These are in use from now on."""
        self._taken = found

    def fails(self, found: Sequence[FileStamp | None]) -> bool:
        """Record that these can't be used; whether that is new. They are found again: the fault may pass."""
        before, self._failed = self._failed, found
        return found != before

    def _look(self) -> Sequence[FileStamp | None]:
        return [stamp(path) for path in self._paths]


def others_may_read(path: Path) -> bool:
    """Whether every user of this machine may read the file, by its own mode. False if it is gone."""
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False
