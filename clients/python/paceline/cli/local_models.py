"""Models on this machine: paths, names in the models directory, and names in Hugging Face's cache.

Nothing is downloaded here. What is in the cache was put there by `hf download` or by another program.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.common import fail
from paceline.cli.models import DEFAULT_MODEL, models_directory
from paceline.service.model_name import model_name

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MAIN = Path("refs", "main")  # in a cached repository: the commit that its branch was at


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that `serve` takes: a GGUF file, or a directory with a config.json."""

    name: str  # what `serve` takes, apart from the path
    path: Path

    @property
    def size_bytes(self) -> int:
        """Of its file, or of all files in its directory."""
        files = [self.path] if self.path.is_file() else self.path.iterdir()
        return sum(file.stat().st_size for file in files if file.is_file())


def hub_cache() -> Path:
    """Where Hugging Face's programs keep what they download."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given)
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home, "hub").expanduser()


def local_models() -> Iterator[LocalModel]:
    """The models in the models directory, then those in Hugging Face's cache, by name."""
    for path in _entries(models_directory()):
        if _is_model(path):
            yield LocalModel(model_name(path), path)
    for repository in _entries(hub_cache()):
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        if repository.name.startswith("models--") and (snapshot := _snapshot(repository)) is not None:
            yield LocalModel(name, snapshot)


def find_model(given: str) -> Path:
    """The model that a command's user means: a path, or a name of `local_models`.

    Exits with advice if there is none.
    """
    path = Path(given).expanduser()
    if path.exists():
        return path
    found = (model.path for model in local_models() if given in (model.name, model.path.name))
    return next(found, None) or fail(
        hub_advice(given)
        or f"{given}: no such file or directory, and `paceline list` has no model of this name. Give a GGUF"
        " file or a directory with config.json and safetensors files; without a model,"
        f" {DEFAULT_MODEL.name} is served"
    )


def hub_advice(given: str) -> str:
    """What to do about a name of a model on a hub; empty if it can't be one."""
    if not _HUB_NAME.fullmatch(given) or given.endswith(".gguf"):
        return ""
    directory = given.partition("/")[2]
    return (
        f"{given} is not on this machine, and Paceline downloads nothing from a hub. If that is its name"
        f" there: `hf download {given} --local-dir {directory}` (pip install huggingface_hub), then"
        f" `paceline serve {directory}`"
    )


def _entries(directory: Path) -> list[Path]:
    """The entries of a directory by name; none if it can't be read."""
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _is_model(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" if path.is_file() else (path / "config.json").is_file()


def _snapshot(repository: Path) -> Path | None:
    """The files of a cached repository's main branch; None if they are no model that can be served."""
    try:
        commit = (repository / _MAIN).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    path = repository / "snapshots" / commit
    return path if commit and _is_model(path) else None
