"""`paceline doctor`: finds out why requests are not answered, and advises."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.markup import escape
from service_kit.plugins import GROUPS, Plugin, PluginError, installed

from paceline.cli.common import (
    DEFAULT_ADDRESS,
    Address,
    OfModel,
    Place,
    console,
    one_line_errors,
    security,
)
from paceline.cli.diagnosis import Verdict, diagnose
from paceline.cli.scratch import what_runs


def doctor(
    context: typer.Context,
    place: Place = None,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0.001, help="Timeout of each check.")] = 5.0,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    address: Address = DEFAULT_ADDRESS,
    model: OfModel = "",
) -> None:
    """Check a service step by step: connection, TLS, token, state; then request one token.

    Prints the first problem, and what to do about it. Exit status 0: the request was answered; 1: there is
    a problem.
    """
    address = place or address
    with one_line_errors(security(context), address):
        found = diagnose(address, security(context), timeout_s, model)
        plugins = _plugins()
        if as_json:
            fields = {
                "address": address,
                "answered": found.verdict is Verdict.OK,
                "verdict": found.verdict.name,
                "detail": found.detail,
                "note": found.note,
                "advice": found.advice,
                "plugins": plugins,
            }
            typer.echo(json.dumps(fields))
        else:
            color = "green" if found.verdict is Verdict.OK else "red"
            lines = [f"[bold {color}]{escape(found.verdict.value)}[/]: {escape(found.detail)}"]
            if found.note:
                lines.append(f"[yellow]{escape(found.note)}[/]")
            if found.verdict is not Verdict.OK:
                lines.append(escape(found.advice))
            if found.verdict is Verdict.NOBODY:
                lines.append(what_runs())
            for one in plugins:
                what = f"plugin: {one['kind']} {one['name']} of {one['package']}"
                lines.append(f"[red]{escape(one['problem'])}[/]" if one["problem"] else escape(what))
            console.print("\n".join(lines), highlight=False, soft_wrap=True)
    raise typer.Exit(0 if found.verdict is Verdict.OK else 1)


def _plugins() -> list[dict[str, str]]:
    """The plugins that are installed here, each loaded once to see whether that works."""
    return [
        {"kind": one.kind, "name": one.name, "package": one.package, "problem": _problem(one)}
        for group in GROUPS
        for one in installed(group)
    ]


def _problem(plugin: Plugin) -> str:
    try:
        plugin.load()
    except PluginError as error:
        return str(error)
    return ""
