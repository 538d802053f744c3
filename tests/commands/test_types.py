"""mypy --strict and pyright find no fault in the Python of pages and examples, but wrong uses of the SDK."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tests.unit.docs.pages import PAGES, Page

pytestmark = pytest.mark.commands

SDK = ROOT / "clients" / "python"
WRONG = {
    'client.chat("x", max_tokns=3)': "an option that there is not",
    'client.chat("x", max_tokens="3")': "an option of another type",
    'number: int = client.chat("x", schema=City).parsed': "another type than the schema's",
    "paceline.errors.QueueFul": "an error that there is not",
}
RIGHT = 'city: City | None = client.chat("x", schema=City).parsed'
PROGRAM = """import paceline
from pydantic import BaseModel

class City(BaseModel):
    name: str

client = paceline.Client()
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all Python blocks of the pages, the examples, and wrong.py."""
    folder = tmp_path_factory.mktemp("programs")
    for page in map(Page.read, PAGES):
        for number, block in enumerate(page.python):
            (folder / f"{page.path.stem.replace('-', '_')}_{page.path.parent.name}_{number}.py").write_text(
                block
            )
    for path in (ROOT / "examples").glob("*.py"):
        (folder / path.name).write_text(path.read_text())
    (folder / "wrong.py").write_text(PROGRAM + "\n".join((*WRONG, RIGHT)))
    return folder


def complaints(report: list[tuple[str, int, str]]) -> tuple[list[str], set[int]]:
    """What is said of all programs but wrong.py, and the lines of that which are wrong."""
    elsewhere = [f"{path}:{line}: {text}" for path, line, text in report if Path(path).name != "wrong.py"]
    return elsewhere, {line for path, line, _ in report if Path(path).name == "wrong.py"}


WRONG_LINES = set(range(PROGRAM.count("\n") + 1, PROGRAM.count("\n") + 1 + len(WRONG)))


def test_mypy_finds_wrong_uses_and_no_fault_in_pages_and_examples(programs: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull, "--output", "json"]
    command += ["--allow-untyped-defs", "--allow-untyped-calls"]  # a page's own functions need no annotations
    command += [f"--cache-dir={programs / 'cache'}", "--disable-error-code=import-not-found"]
    ended = subprocess.run(
        [*command, *sorted(map(str, programs.glob("*.py")))],
        env={**os.environ, "MYPYPATH": str(SDK)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    report = [(one["file"], one["line"], one["message"]) for one in found if one["severity"] == "error"]
    assert complaints(report) == ([], WRONG_LINES), ended.stderr


def test_pyright_finds_wrong_uses_and_no_fault_in_pages_and_examples(programs: Path) -> None:
    settings = {"typeCheckingMode": "standard", "include": ["*.py"], "extraPaths": [str(SDK), str(ROOT)]}
    (programs / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    ended = subprocess.run(
        [*command, "-p", str(programs)], capture_output=True, text=True, check=False, cwd=programs
    )
    report = [
        (one["file"], one["range"]["start"]["line"] + 1, one["message"])
        for one in json.loads(ended.stdout)["generalDiagnostics"]
        if one["severity"] == "error" and 'Import "openai' not in one["message"]
    ]
    assert complaints(report) == ([], WRONG_LINES), ended.stderr
