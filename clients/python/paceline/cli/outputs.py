"""Files that a command writes at its end, checked before the work whose result they get."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from paceline.cli.common import fail


def require_writable(path: Path | None, option: str) -> None:
    """Exit with an error if this file could not be written. `option` names it; None is nothing to write."""
    if path is None:
        return
    problem = 0
    if path.is_dir():
        problem = errno.EISDIR
    elif not path.parent.is_dir():
        problem = errno.ENOENT
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = errno.EACCES
    if problem:
        fail(f"{option}: {path}: {os.strerror(problem)}", 2)
