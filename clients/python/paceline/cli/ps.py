"""`paceline ps`: the stacks that this user's `serve`, `demo` and `bench` have running on this machine."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from paceline import errors
from paceline.channel import Security
from paceline.cli.common import console, security
from paceline.cli.scratch import stack_directories
from paceline.cli.stack import ChildFiles
from paceline.cli.status import duration
from paceline.client import Client

_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class RunningStack:
    """What a stack's scheduler says about itself; None where it does not answer, or demands a token."""

    pid: int  # of the process that keeps the stack running: stop it with SIGTERM
    port: int  # of its scheduler
    state: str  # the scheduler's, or why it is not known
    model: str | None = None
    running: int | None = None  # sequences
    waiting: int | None = None
    uptime_s: float | None = None


def ps(
    context: typer.Context,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per stack and line.")] = False,
) -> None:
    """List the running stacks of `paceline serve` on this machine.

    Services that were started alone, in containers or by other users are not listed.
    """
    stacks = sorted(_stacks(security(context).token), key=lambda stack: stack.port)
    if as_json:
        for stack in stacks:
            typer.echo(json.dumps(asdict(stack)))
        return
    if not stacks:
        console.print("Nothing is running. `paceline serve` starts a stack.", markup=False, soft_wrap=True)
        return
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for column in ("pid", "port", "model", "state", "running", "waiting", "up"):
        table.add_column(column, overflow="fold")
    for stack in stacks:
        counts = ["-" if count is None else str(count) for count in (stack.running, stack.waiting)]
        up = "-" if stack.uptime_s is None else duration(stack.uptime_s)
        table.add_row(str(stack.pid), str(stack.port), escape(stack.model or "-"), stack.state, *counts, up)
    console.print(table)


def _stacks(token: str) -> Iterator[RunningStack]:
    """The stacks whose processes live. A killed one may leave its directory."""
    for pid, directory in stack_directories():
        files = ChildFiles.of("scheduler", directory)
        try:
            port = int(files.port.read_text())
        except (OSError, ValueError):  # it is just starting, or has just ended
            continue
        if _listens(files.socket):
            yield _asked(pid, port, files.socket, token)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_TIMEOUT_S)
        return client.connect_ex(os.fspath(path)) == 0


def _asked(pid: int, port: int, path: Path, token: str) -> RunningStack:
    security = Security(token=token)
    with Client(f"unix:{path}", security=security, failover_timeout_s=0, directory="off") as client:
        try:
            status = client.status(timeout_s=_TIMEOUT_S)
        except errors.Unauthenticated:
            return RunningStack(pid, port, "needs a token")
        except errors.PacelineError:
            return RunningStack(pid, port, "does not answer")
        try:
            name = client.model_info(timeout_s=_TIMEOUT_S).name
        except errors.PacelineError:
            name = None
    return RunningStack(pid, port, status.state, name, status.running, status.waiting, status.uptime_s)
