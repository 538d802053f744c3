"""Every command, flag, setting and variable that a page names exists."""

from __future__ import annotations

import re
import runpy
import sys
import warnings
from contextlib import redirect_stdout
from functools import cache
from importlib.util import find_spec
from io import StringIO
from itertools import pairwise
from unittest import mock

import pytest
from paceline_openai.settings import parser as gateway_parser

from tests.unit.docs.known_names import (
    MODULES,
    SERVICES,
    SETTINGS_OF,
    cli,
    cli_flags,
    make_targets,
    service_flags,
    settings,
    variables,
)
from tests.unit.docs.pages import NAMES, PAGES, ROOT, Page

OTHERS = {
    "--refresh-traces",  # of pytest
    "--executor",
    "--exact",
    "--kit-seed",
    "--may-drain",
    "--deadline",
    "--dry",  # of make bench-gpu
    "--grpc-fake-server",  # of pytest-grpc
}
"""Flags of the tests' own, which stand alone in a page."""
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")
_VARIABLE = re.compile(r"\bPACELINE_[A-Z_]*[A-Z]\b")


def pages(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(name, [Page.read(path) for path in PAGES], ids=NAMES)


@cache
def help_of(module: str) -> str:
    """The --help of a module that has no settings of a service; run here, where its imports are made."""
    with (
        mock.patch.object(sys, "argv", [module, "--help"]),
        redirect_stdout(StringIO()) as printed,
        warnings.catch_warnings(
            action="ignore", category=RuntimeWarning
        ),  # a module that is imported already
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_module(module, run_name="__main__")
    assert not ended.value.code
    return printed.getvalue()


def flags_in(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]


def check_settings(words: list[str]) -> None:
    """-E, -D and -S hand over settings that exist."""
    for option, value in pairwise(words):
        if service := SETTINGS_OF.get(option):
            name = value.partition("=")[0].replace("_", "-")
            known = {"name"} | settings(service)  # NAME=VALUE stands for any
            assert name in known, f"{option} {value}: no setting of the {service}"


def check_paceline(words: list[str]) -> None:
    """`paceline [options] command ...`."""
    names = [i for i, word in enumerate(words) if word in cli().commands]
    before = words[: names[0]] if names else words
    assert set(flags_in(before)) <= cli_flags(cli()), before
    if not names:
        assert all(word.startswith("-") or "=" not in word for word in words[1:2]), words
        return
    name, after = words[names[0]], words[names[0] + 1 :]
    known = service_flags(name) if name in SERVICES else cli_flags(cli().commands[name])
    assert set(flags_in(after)) <= known, f"paceline {name}: {set(flags_in(after)) - known}"
    check_settings(after)


def check_module(words: list[str]) -> None:
    """`python -m module ...`."""
    module, flags = words[0], flags_in(words[1:])
    assert find_spec(module) is not None, module
    if module in MODULES:
        assert set(flags) <= service_flags(MODULES[module]), flags
    elif flags:
        assert set(flags) <= set(_FLAG.findall(help_of(module))), flags
        check_settings(words)


@pages("page")
def test_every_command_of_a_page_is_one_that_its_program_takes(page: Page) -> None:
    for program, *words in page.commands():
        if program == "paceline" and words:
            check_paceline(words)
        elif program == "python" and words[:1] == ["-m"] and words[1:]:
            check_module(words[1:])
        elif program == "make":
            targets = [word for word in words if "=" not in word and not word.startswith("-")]
            assert set(targets) <= make_targets(), targets


@pages("page")
def test_every_flag_that_stands_alone_is_one_of_some_program(page: Page) -> None:
    known = OTHERS.union(*(service_flags(service) for service in SERVICES), cli_flags(cli()))
    known.update(*(cli_flags(command) for command in cli().commands.values()))
    known.update(_FLAG.findall(gateway_parser().format_help()))
    alone = {flag for code in page.code if code.startswith("--") for flag in _FLAG.findall(code)}
    assert alone <= known, alone - known


@pages("page")
def test_every_setting_that_stands_alone_behind_its_option_exists(page: Page) -> None:
    for code in page.code:
        check_settings(code.split())


@pages("page")
def test_every_variable_is_read_by_something(page: Page) -> None:
    named = set(_VARIABLE.findall(page.path.read_text()))
    assert named <= variables(), named - variables()


def test_the_readme_names_the_two_commands_of_a_newcomer() -> None:
    commands = list(Page.read(ROOT / "README.md").commands())
    assert ["make", "demo"] in commands
    assert ["make", "test"] in commands
