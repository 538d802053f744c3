"""The check that keeps v1 compatible fails on a breaking change and passes on an addition."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROTOS = Path(__file__).parents[3] / "protos"
EXECUTOR = "paceline/executor/v1/executor.proto"
SCHEDULER = "paceline/scheduler/v1/scheduler.proto"
BUF = Path(sys.executable).with_name("buf")


def breaks(scratch: Path, file: str, old: str, new: str) -> bool:
    """Whether the check refuses the protos with `old` replaced by `new` in one file."""
    protos = scratch / "protos"
    shutil.copytree(PROTOS, protos)
    text = (protos / file).read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
    (protos / file).write_text(text.replace(old, new))
    done = subprocess.run(
        [BUF, "breaking", "--against", PROTOS / "v1.binpb"],
        cwd=protos,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 100), done.stderr  # 100: broken; anything else: it did not compile
    return done.returncode == 100


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        pytest.param(EXECUTOR, "  bytes salt = 8;", "", id="field removed"),
        pytest.param(EXECUTOR, "  bytes salt = 8;", "  bytes salt = 99;", id="field renumbered"),
        pytest.param(EXECUTOR, "  bytes salt = 8;", "  string salt = 8;", id="field of another type"),
        pytest.param(SCHEDULER, "  string cache_salt = 9;", "  string salt = 9;", id="field renamed"),
        pytest.param(SCHEDULER, "  DRAFTER_NGRAM = 1;", "  DRAFTER_NGRAM = 7;", id="enum value renumbered"),
        pytest.param(EXECUTOR, "  rpc Drain(DrainRequest) returns (DrainResponse);", "", id="method removed"),
    ],
)
def test_a_breaking_change_fails_the_check(tmp_path: Path, file: str, old: str, new: str) -> None:
    assert breaks(tmp_path, file, old, new)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        pytest.param(
            EXECUTOR, "  bytes salt = 8;", "  bytes salt = 8;\n  bytes other = 99;", id="field added"
        ),
        pytest.param(
            SCHEDULER, "  DRAFTER_NGRAM = 1;", "  DRAFTER_NGRAM = 1;\n  DRAFTER_OTHER = 9;", id="value added"
        ),
    ],
)
def test_an_addition_passes_the_check(tmp_path: Path, file: str, old: str, new: str) -> None:
    assert not breaks(tmp_path, file, old, new)
