"""Processes that find only some of the packages that are installed, as on a machine without the others."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath

from tests.support.checkout import environment

HERE = Path(__file__).parent


def names_in(file: str) -> set[str]:
    """The packages that a list of this folder names."""
    lines = (line.partition("#")[0].strip() for line in (HERE / file).read_text().splitlines())
    return {line for line in lines if line}


def required_by(names: Iterable[str], but_for: Collection[str] = ()) -> set[str]:
    """These packages and what they require, extras and `but_for` aside, as far as it is installed here."""
    installed, known, new = _installed(), set[str](), set(names)
    while new:
        known |= new
        requirements = {
            _normal(re.split(r"[^\w.-]", requirement)[0])
            for name in new & set(installed)
            for requirement in installed[name].requires or []
            if "extra ==" not in requirement
        }
        new = requirements - known - set(but_for)
    return known


def only(names: Collection[str], directory: Path) -> dict[str, str]:
    """The environment of a process that finds these packages and the checkout; `directory` keeps a file."""
    names = {*names, "paceline"}
    kept = {module for name, package in _installed().items() if name in names for module in _modules(package)}
    hidden = {name: package for name, package in _installed().items() if name not in names}
    modules = {module for package in hidden.values() for module in _modules(package)} - kept
    (directory / "hidden.json").write_text(
        json.dumps({"modules": sorted(modules), "packages": sorted(hidden)})
    )
    found = environment()
    path = os.pathsep.join([str(HERE / "hiding"), found["PYTHONPATH"]])
    return {**found, "PYTHONPATH": path, "HIDDEN_PACKAGES": str(directory / "hidden.json")}


@cache
def _installed() -> dict[str, Distribution]:
    return {_normal(package.metadata["Name"]): package for package in distributions()}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _modules(package: Distribution) -> Iterable[str]:
    """Modules of a package and the packages they are in, whole or in part."""
    for file in package.files or []:
        if file.suffix in (".py", ".so") and ".." not in file.parts:
            parts = PurePosixPath(file).with_name(file.name.partition(".")[0]).parts
            for end in range(1, len(parts) + 1):
                yield ".".join(parts[:end])
