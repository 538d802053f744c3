"""`paceline timeline`: the streams of a scheduler, and its steps, as they come or out of a file."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live

from paceline.bounded_files import read_bounded
from paceline.channel import Security
from paceline.cli.common import DEFAULT_ADDRESS, check_address, console, fail, one_line_errors, security
from paceline.cli.steps import watch
from paceline.cli.timeline_view import Timeline
from paceline.steps import read_steps, steps_of

_MAX_FILE_BYTES = 512 << 20
"""The log of a scheduler has 64 MiB; one that was watched for long is larger."""
_SHOW_S = 30.0
_LIVE_ROWS, _FILE_ROWS = 8, 1000
"""Rows of streams at least on a terminal, and at most elsewhere."""


def timeline(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            help="The scheduler, host:port or unix:/path; or a file that `paceline steps` has written.",
            envvar="PACELINE_ADDRESS",
        ),
    ] = DEFAULT_ADDRESS,
    *,
    seconds: Annotated[float, typer.Option(help="Seconds until it stops; 0: with Ctrl-C.", min=0)] = 0,
    last: Annotated[
        float | None,
        typer.Option(help="Seconds that are shown (default: 30, of a file all).", min=0.1, max=3600),
    ] = None,
) -> None:
    """Show streams as rows over the last seconds: which run, which wait, and for what.

    Above them steps, tokens a second, the queue, pages and prefix hits. Others' requests are numbers, unless
    an administrator asks.
    """
    if Path(source).is_file():
        _show_file(Path(source), last)
        return
    try:
        check_address(source)
    except typer.BadParameter as error:
        fail(f"{error}, or a file", 2)
    if not seconds and not console.is_terminal:
        fail("--seconds is needed where the output is no terminal", 2)
    view = Timeline(last or _SHOW_S)
    with one_line_errors(source):
        if console.is_terminal:
            _show_live(security(context), source, seconds, view)
        else:
            _read(security(context), source, seconds, view)
            console.print(view.picture(console.width, _FILE_ROWS, ascii_only=console.options.ascii_only))


def _show_file(path: Path, last: float | None) -> None:
    view = Timeline(last)
    try:
        for step in read_steps(read_bounded(path, _MAX_FILE_BYTES)):
            view.add(step)
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    except ValueError as error:
        fail(f"{path} is no file of `paceline steps`: {error}")
    console.print(view.picture(console.width, _FILE_ROWS, ascii_only=console.options.ascii_only))


def _read(security: Security, address: str, seconds: float, view: Timeline) -> None:
    for log in watch(security, address, seconds, view.seconds or 0.0):
        for step in steps_of(log):
            view.add(step)


def _show_live(security: Security, address: str, seconds: float, view: Timeline) -> None:
    """Draw four times a second, also while no step comes."""
    lock = threading.Lock()  # the picture is drawn by a thread of its own

    def picture() -> RenderableType:
        rows = max(_LIVE_ROWS, console.height - Timeline.FIGURES - 1)
        with lock:
            return view.picture(console.width, rows, now_us=time.time_ns() // 1000)

    with Live(console=console, get_renderable=picture, refresh_per_second=4, screen=not seconds):
        for log in watch(security, address, seconds, view.seconds or 0.0):
            with lock:
                for step in steps_of(log):
                    view.add(step)
