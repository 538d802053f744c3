"""`paceline status`: the scheduler's live counters."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from paceline import errors
from paceline.cli.common import DEFAULT_ADDRESS, Address, OfModel, console, one_line_errors, security
from paceline.cli.rows import counted
from paceline.client import Client
from paceline.types import ExecutorStatus, ModelInfo, Status

_TIMEOUT_S = 10.0
_NAME = 24  # characters of a model's name that stand there unbroken
_WIDE = 70  # columns of a terminal from which on two counters stand in a line


def status(
    context: typer.Context,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    interval_s: Annotated[float, typer.Option(min=0.05, help="Between refreshes of --watch.")] = 1.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object (a line each with --watch).")
    ] = False,
    address: Address = DEFAULT_ADDRESS,
    of_model: OfModel = "",
) -> None:
    """Show what the scheduler and its executors are doing."""
    with (
        one_line_errors(security(context), address),
        Client(
            address, security=security(context), failover_timeout_s=0, directory="off", model=of_model
        ) as client,
    ):

        def look() -> tuple[Status, tuple[ExecutorStatus, ...], ModelInfo | None]:
            return client.status(timeout_s=_TIMEOUT_S), executors(client), model(client)

        if not as_json and not of_model:
            _say_which(client)
        with _display(as_json=as_json, in_place=watch and console.is_terminal) as show:
            show(*look())
            try:
                while watch:
                    time.sleep(interval_s)
                    show(*look())
            except KeyboardInterrupt:
                raise typer.Exit(0) from None


def _say_which(client: Client) -> None:
    """Of several models: their names, and that the first one's counters come."""
    with suppress(errors.PacelineError):
        if len(names := client.models(timeout_s=_TIMEOUT_S)) > 1:
            states = ", ".join(f"{name} ({state})" for name, state in names.items())
            line = f"models here: {states}; this is the first, and --model NAME shows another"
            console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


_Show = Callable[[Status, tuple[ExecutorStatus, ...], ModelInfo | None], None]


@contextmanager
def _display(*, as_json: bool, in_place: bool) -> Iterator[_Show]:
    """A context manager: within the block, the function shows what was seen.

    As a line of JSON, or as tables, which replace those before with `in_place`: on a terminal alone.
    """
    if as_json:
        yield lambda *seen: typer.echo(_json(*seen))
    elif in_place:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda *seen: live.update(table(*seen), refresh=True)
    else:
        yield lambda *seen: console.print(table(*seen))


def executors(client: Client) -> tuple[ExecutorStatus, ...]:
    """The executors; empty for callers without admin rights."""
    try:
        return client.executors(timeout_s=_TIMEOUT_S)
    except errors.Unauthenticated:
        return ()


def model(client: Client) -> ModelInfo | None:
    """The model; None while it is loading."""
    try:
        return client.model_info(timeout_s=_TIMEOUT_S)
    except errors.RetryLater:
        return None


def _json(status: Status, executors: tuple[ExecutorStatus, ...], model: ModelInfo | None) -> str:
    about = None
    if model is not None:
        about = {
            "name": model.name,
            "capabilities": model.capabilities,
            "tool_format": model.tool_format,
        }
    listed = [dataclasses.asdict(one) for one in executors]
    return json.dumps(dataclasses.asdict(status) | {"executors": listed, "model": about})


def table(
    status: Status, executors: tuple[ExecutorStatus, ...], model: ModelInfo | None = None
) -> RenderableType:
    """All counters, as two tables."""
    counters = Table(show_header=False, box=None, padding=(0, 1), pad_edge=False)
    wide = console.width >= _WIDE and (model is None or len(model.name) <= _NAME)
    for _ in range(4 if wide else 2):
        counters.add_column(overflow="fold")
    hit = status.cached_tokens / status.prompt_tokens if status.prompt_tokens else 0.0
    running = f"{status.running} of {status.seats}" if status.seats else f"{status.running}"
    arriving = f", {status.arriving} arriving" if status.arriving else ""
    waiting = f"{status.waiting} ({counted(status.waiting_tokens, 'token')}){arriving}"
    rows = [
        ("state", status.state, "up", duration(status.uptime_s)),
        ("running", running, "waiting", waiting),
        ("requests", f"{status.requests}", "finished", f"{status.finished}"),
        ("cancelled", f"{status.cancelled}", "failed", f"{status.failed}"),
        ("refused", f"{status.refused}", "preempted", f"{status.preemptions}"),
        (
            "prompt tokens",
            f"{status.prompt_tokens} ({hit:.0%} cached)",
            "generated",
            f"{status.completion_tokens}",
        ),
        (
            "prompt tok/s",
            f"{status.prompt_tokens_per_s:.0f}",
            "new tok/s",
            f"{status.completion_tokens_per_s:.0f}",
        ),
        ("steps", f"{status.steps}", "step", f"{status.step_ms:.1f} ms, {status.batch_rows:.1f} rows"),
    ]
    if model is not None:
        reasons = "yes" if "reasoning" in model.capabilities else "no"
        rows.insert(1, ("model", escape(model.name), "tool calls", escape(model.tool_format or "none")))
        rows.insert(2, ("grammars", "yes" if "grammar" in model.capabilities else "no", "reasoning", reasons))
    if status.verifications:
        share = status.accepted_tokens / status.drafted_tokens
        more = status.accepted_tokens / status.verifications
        rows.append(
            (
                "drafts",
                f"{status.drafted_tokens} ({share:.0%} accepted)",
                "verifications",
                f"{status.verifications} ({1 + more:.2f} tokens each)",
            )
        )
    if status.draft_step_ms:
        rows.append(("draft step", f"{status.draft_step_ms:.1f} ms", "", ""))
    for left, left_value, right, right_value in rows:
        if wide:
            counters.add_row(f"[dim]{left}[/]", left_value, f"[dim]{right}[/]", right_value)
            continue
        counters.add_row(f"[dim]{left}[/]", left_value)
        if right:
            counters.add_row(f"[dim]{right}[/]", right_value)
    if not executors:
        return Group(counters, "", "[dim]The executors are shown to an administrator's token.[/]")
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in ("executor", "state", "pages used", "losses"):
        table.add_column(column, style=None, header_style="dim")
    for executor in executors:
        table.add_row(executor.address, _state(executor), _pages(executor), f"{executor.losses}")
    return Group(counters, "", table)


def _state(executor: ExecutorStatus) -> str:
    if not executor.connected:
        return f"[red]lost[/]{' (drafts)' if executor.draft else ''} {escape(executor.detail)}".rstrip()
    if executor.draining:
        return "[yellow]draining[/]"
    if executor.draft:
        return "[green]drafts[/]" if executor.active else "standby to draft"
    return "[green]active[/]" if executor.active else "standby"


def _pages(executor: ExecutorStatus) -> str:
    used = executor.total_pages - executor.available_pages
    return f"{used} of {executor.total_pages}" if executor.total_pages else "-"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
