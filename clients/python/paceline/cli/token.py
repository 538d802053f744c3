"""`paceline token`: draws a token, and prints its entry for a tokens file."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated

import typer

from paceline.cli.common import fail
from paceline.cli.stack_secrets import draw_token

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")


def token(
    name: Annotated[str, typer.Argument(help="The caller's name: letters, digits and . _ @ -")],
    weight: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=1000, help="Share relative to other names. Default: 1.", show_default=False
        ),
    ] = None,
    max_priority: Annotated[
        int | None, typer.Option(help="Highest priority of its requests. Default: 0.", show_default=False)
    ] = None,
    *,
    admin: Annotated[bool, typer.Option("--admin", help="May act on requests of other callers.")] = False,
    directory: Annotated[
        bool, typer.Option("--directory", help="May announce a scheduler to the directory of a fleet.")
    ] = False,
) -> None:
    """Draw a token. Prints it, and then its line for the scheduler's tokens file.

    The line holds the token's hash alone. The scheduler reads the file again when it changes.

        paceline token alice            # line 1: for alice. Line 2: for the file
        paceline serve -S tokens-file=tokens.yaml
    """
    if not _NAME.fullmatch(name):
        fail(f"NAME: expected 1 to 64 letters, digits and . _ @ -, got {name!r}", 2)
    drawn = draw_token()
    typer.echo(drawn)
    typer.echo(entry(name, drawn, weight, max_priority, admin=admin, directory=directory))


def entry(
    name: str,
    token: str,
    weight: float | None = None,
    max_priority: int | None = None,
    *,
    admin: bool = False,
    directory: bool = False,
) -> str:
    """One entry of a tokens file: an item of a YAML list."""
    # Quoted: YAML reads no and 1e5 as other things than names, and hashes of digits as numbers.
    fields = [f'name: "{name}"', f'sha256: "{hashlib.sha256(token.encode()).hexdigest()}"']
    if weight is not None:
        fields.append(f"weight: {weight!r}")
    if max_priority is not None:
        fields.append(f"max_priority: {max_priority}")
    if admin:
        fields.append("admin: true")
    if directory:
        fields.append("directory: true")
    return f"- {{{', '.join(fields)}}}"
