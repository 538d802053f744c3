"""The name of a model: that of its files, the same in requests, logs and replies."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

MAX_NAME = 200  # characters

MAX_PARTS = 512  # of a GGUF file: each one is an open file

_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})(\.gguf)", re.IGNORECASE | re.DOTALL)
_CACHED = re.compile(r"models--(?:.+--)?(.+)")


def gguf_parts(name: str) -> list[str]:
    """The names of all files of a GGUF model of which one has this name; most have no other.

    The parts of one that was split are called NAME-00001-of-00003.gguf and so on.
    """
    found = _PART.fullmatch(name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]) <= MAX_PARTS:
        return [name]
    return [f"{found[1]}-{number:05}-of-{found[3]}{found[4]}" for number in range(1, int(found[3]) + 1)]


def gguf_stem(name: str) -> str:
    """A GGUF file's name without .gguf, and without the number of a part."""
    found = _PART.fullmatch(name)
    return found[1] if found else PurePath(name).stem


def model_name(path: Path) -> str:
    """The file's name without .gguf and the number of a part, or the directory's.

    A directory in Hugging Face's cache is named by its commit: its model is named by the directory above.
    Names within GGUF files are not used: they are whatever the converter was called with.
    """
    if path.suffix.lower() == ".gguf":
        return _text(gguf_stem(path.name))
    real = path.resolve()
    if real.parent.name == "snapshots" and (found := _CACHED.fullmatch(real.parent.parent.name)):
        return _text(found[1])
    return _text(real.name)


def _text(name: str) -> str:
    """A file's name as text that can be sent, whatever its bytes."""
    return name.encode(errors="replace").decode()[:MAX_NAME]
