"""`paceline why`: what a request waits for, and what would end that."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from functools import partial
from typing import Annotated

import typer
from rich.markup import escape

from paceline import errors
from paceline.cli.common import DEFAULT_ADDRESS, Address, OfModel, console, fail, one_line_errors, security
from paceline.client import Client
from paceline.types import RequestWait, Waits

_TIMEOUT_S = 10.0
_CUT = "…"
"""Before the end of an id, or behind its beginning: it stands for those that end, or begin, so."""
_MIN_PART = 8  # characters
_SHOWN_IDS = 8  # of those that an ambiguous part belongs to


def why(
    context: typer.Context,
    request_id: Annotated[
        str | None,
        typer.Argument(
            help="Id of a request: `request_id`, or the header request-id. Its end or its beginning will do: "
            "8 characters, that no other has."
        ),
    ] = None,
    *,
    slow: Annotated[
        bool,
        typer.Option("--slow", help="All that have waited twice as long as predicted, and a second."),
    ] = False,
    identity: Annotated[str, typer.Option(help="Whose request; for administrators.")] = "",
    everybody: Annotated[bool, typer.Option("--all", help="Anybody's requests; for administrators.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per request and line.")] = False,
    address: Address = DEFAULT_ADDRESS,
    model: OfModel = "",
) -> None:
    """Say why a request waits, for how long it has by reason, and what would help.

    Ended requests are known for an hour.
    """
    if (request_id is None) != slow:
        fail("name a request, or use --slow", 2)
    if identity and everybody:
        fail("--identity and --all exclude each other", 2)
    with (
        one_line_errors(address),
        Client(
            address, security=security(context), failover_timeout_s=0, directory="off", model=model
        ) as client,
    ):
        ask = partial(client.why, identity=identity, all_identities=everybody, timeout_s=_TIMEOUT_S)
        found = ask(request_id)
        if request_id and not found.requests and _CUT not in request_id and len(request_id) >= _MIN_PART:
            with suppress(errors.InvalidRequest):  # of an older scheduler
                ends, begins = ask(f"{_CUT}{request_id}"), ask(f"{request_id}{_CUT}")
                found = Waits((*ends.requests, *begins.requests), ends.left_out + begins.left_out)
    ids = dict.fromkeys(one.request_id for one in found.requests)
    if not slow and len(ids) > 1:
        others = f" and {len(ids) - _SHOWN_IDS} more" if len(ids) > _SHOWN_IDS else ""
        fail(f"{request_id} is a part of several ids: {', '.join([*ids][:_SHOWN_IDS])}{others}")
    for one in found.requests:
        typer.echo(json.dumps(dataclasses.asdict(one))) if as_json else _show(one)
    if as_json:
        return
    if found.left_out:
        console.print(f"{found.left_out} more wait.", markup=False)
    if not found.requests and slow:
        console.print("No request has waited for long.", markup=False)
    elif not found.requests:
        fail(f"{request_id} is not known: it never came here, ended long ago, or is another identity's")


def _show(one: RequestWait) -> None:
    whose = f" [dim]of {escape(one.identity)}[/]" if one.identity else ""
    labels = "".join(f" {key}={value}" for key, value in sorted(one.labels.items()))
    console.print(f"[bold]{escape(one.request_id)}[/]{whose}[dim]{escape(labels)}[/]", soft_wrap=True)
    console.print(f"  {escape(one.explanation)}", highlight=False, soft_wrap=True)
