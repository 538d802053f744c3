"""The page that says what each megabyte is for names all that serving installs, and nothing else."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import requires

from packaging.requirements import Requirement

from tests.support.checkout import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(distribution: str, extra: str) -> list[Requirement]:
    """What a distribution asks for on this platform, without extras (""), or with one in addition.

    Paceline's own are read from its source: what is installed may be older.
    """
    if distribution == "paceline":
        lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
        return [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate()]
    asked = [one for one in map(Requirement, requires(distribution) or []) if applies(one, extra)]
    return [one for one in asked if not extra or not applies(one, "")]


def applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def closure(distribution: str, extras: Iterable[str]) -> set[str]:
    """All distributions that one asks for with some extras, on this platform."""
    found: set[tuple[str, str]] = set()
    ahead = [(distribution, extra) for extra in ("", *extras)]
    while ahead:
        one = ahead.pop()
        if one not in found:
            found.add(one)
            for wanted in requirements(*one):
                ahead += [(normal(wanted.name), extra) for extra in ("", *wanted.extras)]
    return {name for name, _ in found} - {distribution}


def test_the_page_says_what_each_distribution_that_serving_installs_is_for() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    rows = re.findall(r"^\| [\d.]+ \| (.+?) \| \S", page, re.MULTILINE)
    assert sorted(", ".join(rows).split(", ")) == sorted(closure("paceline", ["all"]))
