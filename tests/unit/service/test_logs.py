"""Which packages a service's log shows, and that its lines stay lines."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_kit import logs

from tests.support.checkout import ROOT

PACKAGES = [
    Path(folder).name
    for folder in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]["packages"]
]


@pytest.fixture
def _restored() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in (None, *PACKAGES)]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.mark.usefixtures("_restored")
def test_every_package_that_runs_in_a_service_logs_at_the_level_asked_for_and_others_at_warning() -> None:
    logs.configure(level="info")
    quiet = {name for name in PACKAGES if not logging.getLogger(f"{name}.x").isEnabledFor(logging.INFO)}
    assert quiet == {"pytest_paceline"}
    assert not logging.getLogger("httpx").isEnabledFor(logging.INFO)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("foreign", ["a\n10:02:11 INFO    all is well", "\x1b]52;c;aGk=\x07", "\x9b2J", "\r"])
def test_what_others_say_is_part_of_one_line_and_gives_no_orders(
    foreign: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("console", "info")
    logs.Log("service_kit.x").warning("chats are refused", why=foreign, model="m")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert line.endswith(" model=m")
