"""Texts of `score`, `embed` and `rerank`: arguments, or the lines of a file or of stdin."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.common import fail

Adapter = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="The model, or an adapter.", show_default="the model"),
]
InputFile = Annotated[
    Path | None,
    typer.Option("--file", "-f", metavar="FILE", help="Read from this file; '-': from stdin."),
]


def read_text(path: Path | None) -> str:
    """All of a file, or of stdin without one. Exits with an error if it can't be read."""
    if path is None or str(path) == "-":
        if path is None and sys.stdin.isatty():
            fail("give texts as arguments, name a --file, or pipe them in", 2)
        return sys.stdin.read()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--file: {path}: {error}", 2)


def texts(given: list[str] | None, path: Path | None) -> list[str]:
    """The arguments, else the lines that are not empty. Exits with an error if there are none, or both."""
    if given and path is not None:
        fail("give texts as arguments or a --file, not both", 2)
    found = given or [line for line in read_text(path).split("\n") if line.strip()]
    if not found:
        fail("there is no text", 2)
    return found
