"""Client options given before a command that starts services: refused where they would be ignored."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import typer
from service_kit.security import read_token

from paceline.bounded_files import others_may_read
from paceline.channel import Security
from paceline.cli.common import fail, security, warn

TOKEN_VARIABLE = "PACELINE_TOKEN"
_CLIENT_OPTIONS = ("token", "tls_ca", "tls_cert", "tls_key")
_GIVEN = "paceline.given_client_options"


def note_command_line(context: typer.Context) -> frozenset[str]:
    """The client options given on the command line, not by a variable. Stored for `refuse_client_options`."""
    sources = {option: context.get_parameter_source(option) for option in _CLIENT_OPTIONS}
    given = frozenset(option for option, source in sources.items() if source and source.name == "COMMANDLINE")
    context.meta[_GIVEN] = given
    return given


def refuse_client_options(context: typer.Context, but: Collection[str] = ()) -> None:
    """Exit with an error if client options were given: ignoring them would leave the service unprotected.

    `but`: those that the command uses.
    """
    given = sorted(set(context.meta.get(_GIVEN, ())) - set(but))
    if "token" in given:
        fail(
            "--token would show in the process list, and is for clients: give serve --token-file FILE or"
            f" {TOKEN_VARIABLE}, a service alone --auth-token-file FILE",
            2,
        )
    if given:
        fail(
            f"--{given[0].replace('_', '-')} before the command is a client's: TLS is served with"
            " -S tls-cert=FILE -S tls-key=FILE, by a service alone with --tls-cert FILE --tls-key FILE",
            2,
        )


def client_token(context: typer.Context, token_file: Path | None) -> str:
    """The token that clients must send; "": none. Exits with an error if variable and file differ."""
    from_variable = security(context).token
    try:
        from_file = read_token(token_file)
        Security(token=from_file)  # raises ValueError for a token that can't be sent
    except ValueError as error:
        fail(f"--token-file: {error}", 2)
    if from_variable and from_file and from_variable != from_file:
        fail(f"{TOKEN_VARIABLE} and --token-file name different tokens: give one of them", 2)
    if token_file is not None and others_may_read(token_file):
        warn(f"--token-file: every user of this machine may read {token_file}: chmod 600")
    return from_file or from_variable


def refuse_ignored_token(context: typer.Context, service: str) -> None:
    """Exit with an error if PACELINE_TOKEN is set and the service has no token setting of its own.

    The service does not read PACELINE_TOKEN, and would accept calls without a token.
    """
    refuse_client_options(context)
    if not os.environ.get(TOKEN_VARIABLE) or any(argument in ("-h", "--help") for argument in context.args):
        return
    given = {argument.partition("=")[0] for argument in context.args}
    prefix = f"PACELINE_{service.upper()}_"
    closed = any(
        f"--{name}" in given or os.environ.get(prefix + name.replace("-", "_").upper())
        for name in ("auth-token-file", "tokens-file", "secrets-stdin", "config")
    )
    if not closed:
        fail(
            f"{TOKEN_VARIABLE} is set, which `paceline {service}` does not read: it would serve without a"
            " token. Give --auth-token-file FILE, or unset it",
            2,
        )
