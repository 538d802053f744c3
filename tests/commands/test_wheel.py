"""The wheel, as pip builds it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.checkout import ROOT

pytestmark = pytest.mark.commands


def test_the_wheel_has_the_protos_that_stubs_are_generated_from(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("paceline-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    packed = tmp_path / "installed" / "paceline" / "protos"
    sources = sorted((ROOT / "protos").rglob("*.proto"))
    names = [str(source.relative_to(ROOT / "protos")) for source in sources]
    assert [(packed / name).read_bytes() for name in names] == [source.read_bytes() for source in sources]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{packed}", f"--python_out={tmp_path}"]
    subprocess.run([*protoc, *names], check=True)
    assert (tmp_path / "paceline" / "scheduler" / "v1" / "scheduler_pb2.py").exists()
