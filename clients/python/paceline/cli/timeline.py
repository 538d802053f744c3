"""`paceline timeline`: the streams of a scheduler, and its steps, as they come or out of a file."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live

from paceline import errors, timeline_page
from paceline.bounded_files import read_bounded
from paceline.channel import Security
from paceline.cli.common import (
    DEFAULT_ADDRESS,
    Address,
    OfModel,
    check_address,
    console,
    fail,
    one_line_errors,
    security,
)
from paceline.cli.steps import watch
from paceline.cli.timeline_view import Timeline
from paceline.cli.timeline_web import StepStore, Why, page_of
from paceline.client import Client
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.steps import read_logs, read_steps, steps_of

_MAX_FILE_BYTES = 512 << 20
"""The log of a scheduler has 64 MiB; one that was watched for long is larger."""
_SHOW_S, _SERVE_S = 30.0, 600.0
"""What is shown at the beginning, in a terminal and on a page."""
_ASK_S = 10.0
_BEFORE_S = 60.0
"""Read from before what is shown: requests that came or began to wait then are shown too."""
_LIVE_ROWS, _FILE_ROWS = 8, 1000
"""Rows of streams at least on a terminal, and at most elsewhere."""


def timeline(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(metavar="ADDRESS", help="As --address; or a file that `paceline steps` has written."),
    ] = None,
    *,
    seconds: Annotated[float, typer.Option(help="Seconds until it stops; 0: with Ctrl-C.", min=0)] = 0,
    last: Annotated[
        float | None,
        typer.Option(help="Seconds that are shown (default: 30, of a file all).", min=0.1, max=3600),
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="Show them in a browser: serves a page on loopback.")
    ] = False,
    address: Address = DEFAULT_ADDRESS,
    model: OfModel = "",
) -> None:
    """Show streams as rows over the last seconds: which run, which wait, and for what.

    Above them steps, tokens a second, the queue, pages and prefix hits. Others' requests are numbers, unless
    an administrator asks.
    """
    source = source or address
    if Path(source).is_file():
        _serve_file(Path(source), seconds) if web else _show_file(Path(source), last)
        return
    try:
        check_address(source)
    except typer.BadParameter as error:
        fail(f"{error}, or a file", 2)
    if web:
        _serve_live(security(context), source, seconds, last or _SERVE_S, model)
        return
    if not seconds and not console.is_terminal:
        fail("--seconds is needed where the output is no terminal", 2)
    view = Timeline(last or _SHOW_S)
    with one_line_errors(security(context), source):
        logs = watch(security(context), source, seconds, (view.seconds or 0.0) + _BEFORE_S, model)
        if console.is_terminal:
            _show_live(logs, seconds, view)
        else:
            _show_at_end(logs, view)


@contextmanager
def _reading(path: Path) -> Iterator[bytes]:
    """A context manager: gives the file's content. Errors of it end the command."""
    try:
        yield read_bounded(path, _MAX_FILE_BYTES)
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    except (ValueError, errors.InternalError) as error:
        fail(f"{path} is no file of `paceline steps`: {error}")


def _serve_file(path: Path, seconds: float) -> None:
    store = StepStore()
    with _reading(path) as content:
        for log in read_logs(content):
            store.add(log)
    _serve(str(path), store, None, seconds)


def _serve_live(security: Security, address: str, seconds: float, last: float, model: str) -> None:
    store = StepStore()

    def follow() -> None:
        try:
            for log in watch(security, address, 0, last, model):
                store.add(log)
        except errors.PacelineError as error:
            store.fail(f"{address}: {error}")

    with (
        one_line_errors(security, address),
        Client(address, security=security, failover_timeout_s=0, directory="off", model=model) as client,
    ):
        client.status(timeout_s=_ASK_S)  # before the page says that it is there

        def why(request_id: str, identity: str) -> str:
            try:
                found = client.why(request_id, identity=identity, timeout_s=_ASK_S)
            except errors.PacelineError as error:
                return str(error)
            return timeline_page.why(found)

        threading.Thread(target=follow, name="steps", daemon=True).start()
        _serve(address, store, why, seconds)


def _serve(source: str, store: StepStore, why: Why | None, seconds: float) -> None:
    """Serve the page for some seconds; 0: until Ctrl-C."""
    with page_of(source, store, why) as url:
        typer.echo(f"The page is at {url} for this user. Ctrl-C stops.")
        threading.Event().wait(seconds or None)


def _show_file(path: Path, last: float | None) -> None:
    view = Timeline(last)
    with _reading(path) as content:
        for step in read_steps(content):
            view.add(step)
    _print(view)


def _show_at_end(logs: Iterator[pb.StepLog], view: Timeline) -> None:
    """One picture, also if the end is the scheduler's, or Ctrl-C."""
    try:
        for log in logs:
            for step in steps_of(log):
                view.add(step)
    finally:
        if len(view) or sys.exception() is None:
            _print(view)


def _print(view: Timeline) -> None:
    console.print(view.picture(console.width, _FILE_ROWS, ascii_only=console.options.ascii_only))


def _show_live(logs: Iterator[pb.StepLog], seconds: float, view: Timeline) -> None:
    """Draw four times a second, also while no step comes."""
    lock = threading.Lock()  # the picture is drawn by a thread of its own

    def picture() -> RenderableType:
        rows = max(_LIVE_ROWS, console.height - Timeline.FIGURES - 1)
        with lock:
            return view.picture(console.width, rows, now_us=time.time_ns() // 1000)

    with Live(console=console, get_renderable=picture, refresh_per_second=4, screen=not seconds):
        for log in logs:
            with lock:
                for step in steps_of(log):
                    view.add(step)
