"""Compiled kernels are kept somewhere, and an operator hears where if it is not where they should be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from executor_service.backends.torch_backend.cpu import kernel_cache
from executor_service.backends.torch_backend.cpu.kernel_cache import folder_name, writable_folder


@pytest.fixture
def unwritable(tmp_path: Path) -> Path:
    """For root too: there is a file in the way."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "kernels"


def test_a_writable_folder_is_used_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert writable_folder(tmp_path / "a" / "b", tmp_path / "fallback") == tmp_path / "a" / "b"
    assert not caplog.records
    assert not (tmp_path / "fallback").exists()


def test_an_unwritable_one_is_named_and_a_private_folder_takes_its_place(
    tmp_path: Path, unwritable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fallback = tmp_path / "fallback"
    for _ in range(2):  # the second start finds what the first one left
        assert writable_folder(unwritable, fallback) == fallback
    assert fallback.stat().st_mode & 0o777 == 0o700
    assert [str(unwritable) in record.message for record in caplog.records] == [True, True]
    assert "NUMBA_CACHE_DIR" in caplog.text


@pytest.mark.parametrize("trap", ["open to others", "a link"])
def test_a_folder_that_others_may_have_filled_is_not_used(
    tmp_path: Path, unwritable: Path, caplog: pytest.LogCaptureFixture, trap: str
) -> None:
    fallback, theirs = tmp_path / "fallback", tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    if trap == "a link":
        fallback.symlink_to(theirs)
    else:
        fallback.mkdir()
        fallback.chmod(0o777)
    found = writable_folder(unwritable, fallback)
    assert found not in (fallback, unwritable)
    assert not list(found.iterdir())
    found.rmdir()
    assert "each start compiles anew" in caplog.text


def test_a_change_in_any_room_names_another_folder(tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    names = []
    for file in (tmp_path / "kernels.py", room / "kernels.py"):
        for source in ("one = 1", "one = 2"):
            file.write_text(source)
            names.append(folder_name(tmp_path))
    assert len(set(names)) == len(names)


def told(**variables: str) -> Path:
    """The folder that numba is told in a process with these variables."""
    program = (
        "import numba, executor_service.backends.torch_backend.cpu.kernel_cache;"
        " print(numba.config.CACHE_DIR)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    result = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    return Path(result.stdout.strip())


def test_numba_is_told_the_folder_that_works_and_is_named_after_the_sources(
    tmp_path: Path, unwritable: Path
) -> None:
    folder = told(NUMBA_CACHE_DIR=str(unwritable), TMPDIR=str(tmp_path))
    assert folder.parent == tmp_path
    assert folder.name.endswith(folder_name(Path(kernel_cache.__file__).parent))
