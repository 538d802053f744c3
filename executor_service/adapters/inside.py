"""Files below the adapter directory. No path that a client names, and no link, leads out of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from executor_service.contract.model_error import ModelError

_MAX_PATH_BYTES = 1024


class PathRefused(ValueError):
    """A path that is not one of a directory below the adapter directory."""


class NoSuchAdapter(Exception):
    """There is no directory of this name."""


def find_directory(root: Path, path: str) -> Path:
    """The directory `path` below `root`, without links. Raises PathRefused and NoSuchAdapter."""
    if "\0" in path or len(path.encode()) > _MAX_PATH_BYTES:
        raise PathRefused(f"at most {_MAX_PATH_BYTES} bytes, without NUL")
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise PathRefused("must be relative to the adapter directory, without empty parts, '.' and '..'")
    try:
        found = (root / path).resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        raise NoSuchAdapter(path) from None
    if not found.is_relative_to(root.resolve()):
        raise PathRefused("leads out of the adapter directory")
    if not found.is_dir():
        raise NoSuchAdapter(path)
    return found


def open_file(root: Path, path: Path) -> tuple[BinaryIO, int]:
    """A regular file below `root`, open for reading, and its size in bytes. Raises ModelError."""
    try:
        found = path.resolve(strict=True)
        if not found.is_relative_to(root.resolve()):
            raise ModelError(f"{path.name}: leads out of the adapter directory")
        # Without waiting for the other end of a pipe, and not through a link that was put there meanwhile.
        descriptor = os.open(found, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"{path.name}: {error.strerror}") from None
    except RuntimeError:
        raise ModelError(f"{path.name}: a loop of links") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ModelError(f"{path.name}: not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0), status.st_size
