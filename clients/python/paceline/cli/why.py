"""`paceline why`: what a request waits for, and what would end that."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Annotated

import typer
from rich.markup import escape

from paceline import errors
from paceline.cli.common import (
    DEFAULT_ADDRESS,
    Address,
    OfModel,
    console,
    fail,
    one_line_errors,
    security,
    warn,
)
from paceline.client import Client
from paceline.failover import MODEL_KEY
from paceline.types import RequestWait, Waits

_TIMEOUT_S = 10.0
_CUT = "…"
"""Before the end of an id, or after its beginning: it stands for those that end, or begin, so."""
_MIN_PART = 8  # characters
_ALIKE = 2  # requests of an identity that wait for the same and are shown
_SHOWN_IDS = 8  # of those that an ambiguous part belongs to


def why(
    context: typer.Context,
    request_id: Annotated[
        str | None,
        typer.Argument(
            help="Id of a request: `request_id`, or the header request-id. Its end or its beginning will do: "
            "8 characters, that no other has. `timeline` lists ids; `generate` prints its own with --json or"
            " --usage."
        ),
    ] = None,
    *,
    slow: Annotated[
        bool,
        typer.Option(
            "--slow",
            help="All that have waited twice as long as predicted, and a second; so it is without an id.",
        ),
    ] = False,
    identity: Annotated[str, typer.Option(help="Whose request; for administrators.")] = "",
    everybody: Annotated[bool, typer.Option("--all", help="Anybody's requests; for administrators.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help=f"With --slow: more than {_ALIKE} requests that wait for the same.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per request and line; all of them.")
    ] = False,
    address: Address = DEFAULT_ADDRESS,
    model: OfModel = "",
) -> None:
    """Say why a request waits, for how long it has by reason, and what would help.

    Ended requests are known for an hour.
    """
    if request_id is not None and slow:
        fail("a request and --slow exclude each other", 2)
    slow = request_id is None
    if identity and everybody:
        fail("--identity and --all exclude each other", 2)
    with (
        one_line_errors(security(context), address),
        Client(
            address, security=security(context), failover_timeout_s=0, directory="off", model=model
        ) as client,
    ):
        answers, waiting, taken = dict[str, Waits](), 0, 0
        for name, view in _by_model(client, model).items():
            ask = partial(view.why, identity=identity, all_identities=everybody, timeout_s=_TIMEOUT_S)
            try:
                found = ask(None) if request_id is None else _of_id(ask, request_id)
                if slow and not found.requests:
                    status = view.status(timeout_s=_TIMEOUT_S)
                    waiting += status.waiting + status.arriving
                    taken += status.seats if status.running == status.seats else 0
            except errors.RetryLater as error:
                if not name:
                    raise
                warn(f"model {name} does not answer: {error}")
                continue
            answers[name] = found
    if not answers:
        fail("no loaded model answers")
    for name, found in answers.items():
        if as_json:
            for one in found.requests:
                typer.echo(json.dumps(dataclasses.asdict(one) | ({"model": name} if name else {})))
        elif found.requests:
            if name:
                console.print(f"Model {name}:", markup=False, highlight=False, soft_wrap=True)
            _show_all(found, full=full or not slow)
    is_known = any(found.requests for found in answers.values())
    if request_id is not None and not is_known:
        fail(f"{request_id} is not known: it never came here, ended long ago, is another's, or not read yet")
    if not as_json and not is_known:
        rest = "`paceline why ID` of one that runs says how long steps take; `paceline timeline` lists ids."
        if waiting:
            wait = "1 request waits, not" if waiting == 1 else f"{waiting} requests wait, none"
            places = f"; all {taken} places are taken (scheduler's --max-running gives more)" if taken else ""
            rest = "`paceline timeline` lists ids, and `paceline why ID` of one says what it waits for."
            line = f"{wait} much longer than predicted{places}. {rest}"
        else:
            line = f"No request waits. {rest}"
        console.print(line, markup=False, soft_wrap=True)


def _by_model(client: Client, model: str) -> dict[str, Client]:
    """What asks each model of an address that has several, if none was named; else the client, by ""."""
    models: dict[str, str] = {}
    if not model:
        with suppress(errors.RetryLater):  # it is loading
            models = client.models(timeout_s=_TIMEOUT_S)
    if len(models) < 2:
        return {"": client}
    for name, state in models.items():
        if state == "loading":
            warn(f"model {name} is loading: requests for it wait for that, and are not listed")
    there = [name for name, state in models.items() if state in ("serving", "draining")]
    return {name: client.view(metadata={MODEL_KEY: name}) for name in there}


def _of_id(ask: Callable[[str], Waits], request_id: str) -> Waits:
    """The request of this id; if there is none, that whose id ends or begins so. Several end the command."""
    found = ask(request_id)
    if not found.requests and _CUT not in request_id and len(request_id) >= _MIN_PART:
        with suppress(errors.InvalidRequest):  # of an older scheduler
            ends, begins = ask(f"{_CUT}{request_id}"), ask(f"{request_id}{_CUT}")
            found = Waits((*ends.requests, *begins.requests), ends.left_out + begins.left_out)
    ids = [*dict.fromkeys(one.request_id for one in found.requests)]
    if len(ids) > 1:
        others = f" and {len(ids) - _SHOWN_IDS + found.left_out} more" if len(ids) > _SHOWN_IDS else ""
        fail(f"{request_id} is a part of several ids: {', '.join(ids[:_SHOWN_IDS])}{others}")
    return found


def _show_all(found: Waits, *, full: bool) -> None:
    """The requests; unless `full`, what each identity waits for before them, and of those alike a few."""
    alike: dict[tuple[str, str], list[RequestWait]] = {}
    for one in found.requests:
        alike.setdefault((one.identity, one.reason), []).append(one)
    if not full and len(found.requests) > 1:
        for identity in dict.fromkeys(one.identity for one in found.requests):
            _sum_up([group for (whose, _), group in alike.items() if whose == identity])
    shown = found.requests if full else [one for group in alike.values() for one in group[:_ALIKE]]
    for one in shown:
        _show(one)
    if hidden := len(found.requests) - len(shown):
        console.print(f"{hidden} like these are not shown: --full shows them.", markup=False)
    if found.left_out:
        console.print(f"{found.left_out} more wait.", markup=False)


def _sum_up(groups: list[list[RequestWait]]) -> None:
    """One line: how many requests of an identity wait for what, and what the first in its queue waits for."""
    groups.sort(key=len, reverse=True)
    requests = [one for group in groups for one in group]
    parts = [
        f"{len(group)} for {group[0].reason}" + (f" ({group[0].request_id})" if len(group) == 1 else "")
        for group in groups
    ]
    behind = next((one for one in requests if one.position > 1), None)
    if behind is not None and all(one.position != 1 for one in requests):
        parts.append(f"the first in its queue for {behind.first_reason}")
    whose = f" of {requests[0].identity}" if requests[0].identity else ""
    longest_s = max(one.phase_us for one in requests) / 1e6
    wait = "wait" if len(requests) > 1 else "waits"
    text = f"{len(requests)}{whose} {wait}, for up to {longest_s:.1f} s: {', '.join(parts)}."
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _show(one: RequestWait) -> None:
    whose = f" [dim]of {escape(one.identity)}[/]" if one.identity else ""
    labels = "".join(f" {key}={value}" for key, value in sorted(one.labels.items())).replace("\n", "\\n")
    console.print(f"[bold]{escape(one.request_id)}[/]{whose}[dim]{escape(labels)}[/]", soft_wrap=True)
    console.print(f"  {escape(one.explanation)}", highlight=False, soft_wrap=True)
