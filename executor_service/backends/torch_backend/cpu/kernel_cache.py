"""The folder for compiled kernels, named by a hash of the kernels' sources.

Numba keys its cache by the file of the outermost function alone and would run stale machine code after a
change in a file that it calls into. Import this before any module with kernels.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

import numba
from service_kit.logs import Log

log = Log(__name__)

VARIABLE = "NUMBA_CACHE_DIR"


def writable_folder(wanted: Path, fallback: Path) -> Path:
    """`wanted` if compiled code can be kept there, else `fallback`, else a new folder for this run alone.

    Logs a warning unless it is `wanted`: without a cache, each start compiles for 20 s.
    """
    if (problem := _problem(wanted)) is None:
        return wanted
    remedy = f"set {VARIABLE} to a folder that can be written"
    if _is_private(fallback) and _problem(fallback) is None:
        log.warning(f"compiled kernels can't be kept in {wanted} ({problem}), but in {fallback}; {remedy}")
        return fallback
    log.warning(f"compiled kernels can't be kept in {wanted} ({problem}): each start compiles anew; {remedy}")
    return Path(tempfile.mkdtemp(prefix="paceline-kernels-"))


def _problem(folder: Path) -> str | None:
    """Why the folder, or a folder in it, cannot be written; None: it can. Makes a missing folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for place in (folder, *(inner for inner in folder.iterdir() if inner.is_dir())):
            tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _is_private(folder: Path) -> bool:
    """Whether only this user can write to the folder: others must not put code there that we run."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def folder_name(sources: Path) -> str:
    """The name for kernels whose sources all lie below a folder."""
    digest = hashlib.sha256()
    for source in sorted(sources.rglob("*.py")):
        digest.update(source.read_bytes())
    return f"kernels-{digest.hexdigest()[:16]}"


def _use_folder() -> None:
    name = folder_name(Path(__file__).parent)  # kernels call nothing from elsewhere
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    base = Path(os.environ.get(VARIABLE) or cache / "paceline")
    fallback = Path(tempfile.gettempdir()) / f"paceline-{os.geteuid()}-{name}"
    numba.config.CACHE_DIR = str(writable_folder(base / name, fallback))  # type: ignore[attr-defined]


_use_folder()
