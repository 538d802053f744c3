"""Backends of installed packages are found by name, and a broken one says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from paceline.cli.doctor import _plugins

from executor_service.backends.base import ModelError
from executor_service.backends.factory import make_backend
from executor_service.config import ExecutorConfig
from tests.unit.docs.pages import ROOT

TEMPLATE = ROOT / "examples" / "own_backend"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of installed packages, with the template and two broken ones."""
    (tmp_path / "own_backend.py").symlink_to(TEMPLATE / "own_backend.py")
    (tmp_path / "broken.py").write_text("import a_library_that_nobody_has")
    entries = {"own": "own_backend:make", "broken": "broken:make", "missing": "own_backend:nothing"}
    for name, target in entries.items():
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[paceline.backends]\n{name} = {target}\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def config(*arguments: str) -> ExecutorConfig:
    return ExecutorConfig.from_command_line(arguments, "executor")


def test_an_installed_package_brings_a_backend(install: Path) -> None:
    settings = config("--backend", "own", "--backend-options", "width=24").backend_settings
    assert make_backend(settings).info.hidden_size == 24


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--backend", "broken"], "plugin broken (broken 1.0): ModuleNotFoundError: .*a_library_that"),
        (["--backend", "missing"], "plugin missing (missing 1.0): AttributeError"),
        (["--backend", "own", "--backend-options", "height=1"], "plugin own (own 1.0): .* height"),
    ],
)
def test_a_broken_plugin_is_named_with_the_reason(install: Path, arguments: list[str], reason: str) -> None:
    with pytest.raises(ModelError, match=reason.replace("(", r"\(").replace(")", r"\)")):
        make_backend(config(*arguments).backend_settings)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--backend", "nobodys"], "no installed package has a backend 'nobodys'"),
        (["--backend", "oracle", "--backend-options", "width=1"], "oracle is none"),
    ],
)
def test_the_command_line_refuses_a_backend_that_is_not_there(
    capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    with pytest.raises(SystemExit):
        config(*arguments)
    assert reason in capsys.readouterr().err


def test_two_packages_with_one_backend_are_both_named(
    install: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = install / "other-2.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 2.0\n")
    (other / "entry_points.txt").write_text("[paceline.backends]\nown = own_backend:make\n")
    with pytest.raises(SystemExit):
        config("--backend", "own")
    said = capsys.readouterr().err
    assert "own 1.0" in said
    assert "other 2.0" in said


def test_doctor_lists_what_is_installed_and_what_broke(install: Path) -> None:
    problems = {one["name"]: one["problem"] for one in _plugins()}
    assert problems["own"] == ""
    assert "a_library_that_nobody_has" in problems["broken"]
