"""docs/testing.md and its example, run by pytest as a reader would who has the package installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT, environment
from tests.unit.docs.pages import Page

pytestmark = pytest.mark.commands

PAGE = ROOT / "docs" / "testing.md"
BLOCKS = [block for block in Page.read(PAGE).python if "def test_" in block]
_TIMEOUT_S = 120.0


def run_pytest(directory: Path, *arguments: str) -> str:
    """What pytest says of the tests in a directory, in a process of its own. They must pass."""
    # A tree that was installed before the plugin was there has no entry point of it.
    command = [sys.executable, "-m", "pytest", "-p", "pytest_paceline", "-p", "no:cacheprovider", "-rA"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_a_block_of_tests_passes(block: int, tmp_path: Path) -> None:
    (tmp_path / "test_block.py").write_text(BLOCKS[block])
    names = re.findall(r"^def (test_\w+)", BLOCKS[block], re.MULTILINE)
    passed = re.findall(r"PASSED test_block.py::(\w+)", run_pytest(tmp_path))
    assert sorted(passed) == sorted(names)


def test_the_lines_of_the_script_are_answers(tmp_path: Path) -> None:
    (lines,) = re.findall(r"^```json\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "answers.jsonl").write_text(lines)
    (tmp_path / "test_script.py").write_text(SCRIPT)
    run_pytest(tmp_path)


SCRIPT = '''
from paceline.testing import LiveConfig, LiveService

def double(x: int) -> int:
    """Twice x."""

def test_answers():
    with LiveService(LiveConfig(script="answers.jsonl")) as service, service.client() as client:
        ask = lambda text, **options: client.chat([{"role": "user", "content": text}], **options)
        assert ask("What is the capital of France?").text == "Paris."
        assert client.complete("Once upon").text == " a time"
        assert client.complete("The WEATHER in Paris").text == "It rains."
        assert ask("Double 3.", tools=[double]).tool_calls[0].parsed == {"x": 3}
'''


def test_the_example_passes() -> None:
    passed = run_pytest(ROOT, "examples/test_own_program.py", "-c", os.devnull, "--rootdir", str(ROOT))
    assert "5 passed" in passed


ASYNCIO = """
import pytest

@pytest.mark.{mark}
async def test_asynchronous(paceline_aio_client):
    assert (await paceline_aio_client.complete("x", max_tokens=3, temperature=0)).text

@pytest.mark.{mark}
async def test_fake(paceline_fake):
    paceline_fake.reply("yes")
    async with paceline_fake.aio_client() as client:
        assert (await client.complete("x")).text == "yes"

@pytest.fixture
def anyio_backend():
    return "asyncio"
"""


@pytest.mark.parametrize(
    ("mark", "arguments"), [("asyncio", ("-o", "asyncio_mode=strict")), ("anyio", ("-p", "no:asyncio"))]
)
def test_the_asyncio_client_works_with_either_plugin(
    mark: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "test_asyncio.py").write_text(ASYNCIO.format(mark=mark))
    assert "2 passed" in run_pytest(tmp_path, *arguments)


UNTOLD = """
import pytest
from paceline import errors

def test_hides_the_error(paceline_fake):
    with paceline_fake.client() as client, pytest.raises(errors.PacelineError):
        client.complete("nobody told")
"""


def test_a_call_without_a_reply_fails_the_test_even_if_the_program_hides_it(tmp_path: Path) -> None:
    (tmp_path / "test_untold.py").write_text(UNTOLD)
    with pytest.raises(AssertionError, match=r"had no reply to .*nobody told"):
        run_pytest(tmp_path)
