"""Models on this machine: paths, names in the models directories, and names in Hugging Face's cache."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from service_kit.model_name import gguf_parts, model_name

from paceline.cli.models.directories import hub_cache, model_directories
from paceline.cli.models.hub_files import CONFIG, quantization_of
from paceline.cli.models.wheel import DEFAULT_MODEL

_MAIN = "main"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that `serve` takes: a GGUF file, the first of its parts, or a directory with a config.json."""

    name: str  # what `serve` takes, apart from the path
    path: Path
    in_hub_cache: bool

    @property
    def size_bytes(self) -> int:
        """Of its file, of all its parts, or of all files in its directory."""
        files = self._parts if self.path.is_file() else self.path.iterdir()
        return sum(file.stat().st_size for file in files if file.is_file())

    @property
    def format(self) -> str:
        """The quantization of a GGUF file, or "safetensors"."""
        return quantization_of(self.path.name) if self.path.is_file() else "safetensors"

    @property
    def _parts(self) -> list[Path]:
        return [self.path.with_name(name) for name in gguf_parts(self.path.name)]

    def remove(self) -> None:
        """Delete its files or directory; in Hugging Face's cache, also the content that its names link to."""
        if self.path.is_dir() and not self.path.is_symlink():
            links = [path for path in self.path.rglob("*") if path.is_symlink()]
            contents = [path.resolve() for path in links]
            shutil.rmtree(self.path)
        else:
            contents = [part.resolve() for part in self._parts if part.is_symlink()]
            for part in self._parts:
                part.unlink(missing_ok=part != self.path)
        if self.in_hub_cache:
            repository = _repository(self.path)
            for content in contents:
                if content.is_relative_to(repository / "blobs") and not _is_linked(repository, content):
                    content.unlink(missing_ok=True)
            if not any((repository / "snapshots").rglob("*.*")):
                shutil.rmtree(repository)


def local_models() -> Iterator[LocalModel]:
    """The models in the models directories, then those in Hugging Face's cache, by name.

    A name that is in several directories is the first one's.
    """
    names = set()
    for directory in model_directories():
        for path in _entries(directory):
            name = DEFAULT_MODEL.name if path.name == DEFAULT_MODEL.file_name else model_name(path)
            if _is_listed(path) and name not in names:
                names.add(name)
                yield LocalModel(name, path, in_hub_cache=False)
    for repository in _entries(hub_cache()):
        if repository.name.startswith("models--"):
            yield from _cached(repository)


def find_local(given: str) -> LocalModel | None:
    """The model of this name, if there is one. A repository with one GGUF file needs no quantization."""
    models = list(local_models())
    for model in models:
        of_file = [] if model.in_hub_cache else [model_name(model.path)]
        if given in (model.name, model.path.name, *of_file):
            return model
    files = [model for model in models if model.in_hub_cache and model.name.rpartition(":")[0] == given]
    return files[0] if len(files) == 1 else None


def _cached(repository: Path) -> Iterator[LocalModel]:
    """The models of the branches and tags that the cache knows of a repository."""
    hub_name = repository.name.removeprefix("models--").replace("--", "/", 1)
    for reference in _entries(repository / "refs"):
        name = hub_name if reference.name == _MAIN else f"{hub_name}@{reference.name}"
        try:
            commit = reference.read_text().strip()
        except (OSError, UnicodeDecodeError):
            continue
        if not commit.isalnum():
            continue
        snapshot = repository / "snapshots" / commit
        if _is_listed(snapshot):
            yield LocalModel(name, snapshot, in_hub_cache=True)
        for path in (*_entries(snapshot), *(file for one in _entries(snapshot) for file in _entries(one))):
            if path.is_file() and _is_listed(path):
                yield LocalModel(f"{name}:{quantization_of(path.name)}", path, in_hub_cache=True)


def _repository(path: Path) -> Path:
    """The repository's folder of a path in Hugging Face's cache."""
    cache = hub_cache()
    return cache / path.relative_to(cache).parts[0]


def _is_linked(repository: Path, content: Path) -> bool:
    return any(
        path.is_symlink() and path.resolve() == content for path in (repository / "snapshots").rglob("*")
    )


def _entries(directory: Path) -> list[Path]:
    """The entries of a directory by name; none if it can't be read."""
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def is_model(path: Path) -> bool:
    """Whether there is a directory with a model, or a GGUF file, which needs no such name."""
    if not path.is_file():
        return (path / CONFIG).is_file()
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return True  # the executor says why


def _is_listed(path: Path) -> bool:
    """Whether it is a model by its name, and no further part of one."""
    if not path.is_file():
        return is_model(path)
    return path.suffix.lower() == ".gguf" and path.name == gguf_parts(path.name)[0]
