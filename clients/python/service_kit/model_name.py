"""The name of a model: that of its files, the same in requests, logs and replies."""

from __future__ import annotations

import re
from pathlib import Path

MAX_NAME = 200  # characters

_CACHED = re.compile(r"models--(?:.+--)?(.+)")


def model_name(path: Path) -> str:
    """The file's name without .gguf, or the directory's.

    A directory in Hugging Face's cache is named by its commit: its model is named by the directory above.
    Names within GGUF files are not used: they are whatever the converter was called with.
    """
    if path.suffix.lower() == ".gguf":
        return _text(path.stem)
    real = path.resolve()
    if real.parent.name == "snapshots" and (found := _CACHED.fullmatch(real.parent.parent.name)):
        return _text(found[1])
    return _text(real.name)


def _text(name: str) -> str:
    """A file's name as text that can be sent, whatever its bytes."""
    return name.encode(errors="replace").decode()[:MAX_NAME]
