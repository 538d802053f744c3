"""`paceline ps`: what this user's `serve`, `demo` and `bench` have running on this machine, by model."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from paceline.cli.common import console, security
from paceline.cli.rows import print_aligned
from paceline.cli.running_stacks import running_stacks
from paceline.cli.status import duration


def ps(
    context: typer.Context,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per stack and line.")] = False,
) -> None:
    """List the running stacks of `paceline serve` on this machine, and their models, loaded or not.

    Services that were started alone, in containers or by other users are not listed.
    """
    stacks = sorted(running_stacks(security(context).token), key=lambda stack: stack.port)
    if as_json:
        for stack in stacks:
            typer.echo(json.dumps(asdict(stack)))
        return
    if not stacks:
        console.print("Nothing is running. `paceline serve` starts a stack.", markup=False, soft_wrap=True)
        return
    planned = ["planned memory"] if any(stack.memory_bytes for stack in stacks) else []
    rows = [("pid", "port", "model", "state", "running", "waiting", "up", *planned)]
    for stack in stacks:
        counts = ["-" if count is None else str(count) for count in (stack.running, stack.waiting)]
        up = "-" if stack.uptime_s is None else duration(stack.uptime_s)
        memory = f"{stack.memory_bytes / 1e9:.2f} GB" if stack.memory_bytes else "-"
        state = f"{stack.state}: {stack.detail}" if stack.detail else stack.state
        cells = (str(stack.pid), str(stack.port), stack.model or "-", state, *counts, up, memory)
        rows.append(cells[: len(rows[0])])
    print_aligned(console, rows)
