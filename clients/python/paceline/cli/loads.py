"""`paceline load` and `paceline unload`: one of several models that `paceline serve` has at an address."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.answer import write
from paceline.cli.common import DEFAULT_ADDRESS, Address, TimeoutS, one_line_errors, security
from paceline.client import Client

Name = Annotated[str, typer.Argument(help="The model, as requests name it.", show_default=False)]


def load(
    context: typer.Context, name: Name, address: Address = DEFAULT_ADDRESS, timeout_s: TimeoutS = None
) -> None:
    """Load one of several models, as its first request would, and wait until it serves.

    Where memory is short, others are put away for it. Where callers need tokens, this needs an
    administrator's.
    """
    with one_line_errors(security(context), address), _client(context, address) as client:
        client.load_model(name, timeout_s=timeout_s)
    write(f"{name} is loaded\n")


def unload(
    context: typer.Context, name: Name, address: Address = DEFAULT_ADDRESS, timeout_s: TimeoutS = None
) -> None:
    """Let the requests of one of several models end, and put it away; its next request loads it again.

    Where callers need tokens, this needs an administrator's.
    """
    with one_line_errors(security(context), address), _client(context, address) as client:
        known = client.unload_model(name, timeout_s=timeout_s)
    write(f"{name} is put away\n" if known else f"{name} was not loaded\n")


def _client(context: typer.Context, address: str) -> Client:
    return Client(address, security=security(context), failover_timeout_s=0, directory="off")
