"""The wheel, as pip builds it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.checkout import ROOT

pytestmark = pytest.mark.commands


def built(directory: Path) -> Path:
    """The wheel of this tree, as `make wheel` builds it."""
    subprocess.run([ROOT / ".ci" / "build-wheel", Path(sys.executable).parent, directory], check=True)
    (wheel,) = directory.glob("paceline-*.whl")
    return wheel


def test_the_same_tree_gives_the_same_wheel(tmp_path: Path) -> None:
    assert built(tmp_path / "one").read_bytes() == built(tmp_path / "two").read_bytes()


def test_the_wheel_has_the_protos_that_stubs_are_generated_from(tmp_path: Path) -> None:
    wheel = built(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    packed = tmp_path / "installed" / "paceline" / "protos"
    sources = sorted((ROOT / "protos").rglob("*.proto"))
    names = [str(source.relative_to(ROOT / "protos")) for source in sources]
    assert [(packed / name).read_bytes() for name in names] == [source.read_bytes() for source in sources]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{packed}", f"--python_out={tmp_path}"]
    subprocess.run([*protoc, *names], check=True)
    assert (tmp_path / "paceline" / "scheduler" / "v1" / "scheduler_pb2.py").exists()
