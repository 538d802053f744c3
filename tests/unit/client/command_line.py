"""The command line in this process, and how it says what is wrong."""

from __future__ import annotations

import asyncio

from paceline.cli.app import app
from typer.testing import CliRunner, Result


async def invoked(*arguments: str, stdin: str = "") -> Result:
    """The command in this process, which takes less time."""
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, input=stdin)


def assert_one_line_error(result: Result, status: int = 1) -> str:
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    [line] = result.stderr.strip().splitlines()
    assert line.startswith("paceline: ")
    return line
