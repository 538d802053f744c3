"""Shared by the commands: consoles, the address option, and errors printed as one line."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer
from rich.markup import escape

from paceline import errors, names
from paceline.channel import SCHEDULER_ADDRESS, Security
from paceline.cli.safe_text import SafeConsole
from paceline.cli.supervisor import ChildFailed

if TYPE_CHECKING:
    from paceline.client import Client

_T = TypeVar("_T")
_PROBE_TIMEOUT_S = 2.0
_ARGUMENT = re.compile(r"[a-z_.]+(?=[:\[])")
_OPTIONS = {"choices": "--choice", "speculation.drafter": "--drafter", "text": "prompt", "n": "-n"}
_EXPECTED = (errors.PacelineError, ChildFailed, OSError)

console = SafeConsole()
stderr = SafeConsole(stderr=True)


def check_address(address: str) -> str:
    """Option callback: the address, if it is host:port or unix:path. Raises typer.BadParameter."""
    try:
        names.check_address(address)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not address.startswith("unix:") and not re.fullmatch(r".+:\d{1,5}", address):
        raise typer.BadParameter(f"expected host:port or unix:/path, got {address!r}")
    return address


Address = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        envvar="PACELINE_ADDRESS",
        help="The scheduler: host:port, or unix:/path.",
        callback=check_address,
    ),
]


Place = Annotated[
    str | None,
    typer.Argument(
        metavar="ADDRESS", help="As --address.", callback=lambda given: given and check_address(given)
    ),
]
"""The same before the options, where a command has no other argument."""


def _checked_addresses(given: list[str]) -> list[str]:
    return [check_address(address) for one in given for address in one.split(",") if address]


Addresses = Annotated[
    list[str],
    typer.Option(
        "--address",
        "-a",
        envvar="PACELINE_ADDRESS",
        help="The scheduler: host:port, or unix:/path. Repeatable, or comma-separated: any that serves.",
        callback=_checked_addresses,
        default_factory=lambda: [SCHEDULER_ADDRESS],
        show_default=SCHEDULER_ADDRESS,
    ),
]
"""For commands that generate: a stream is continued on another scheduler if its own dies."""
DEFAULT_ADDRESS = SCHEDULER_ADDRESS
OfModel = Annotated[
    str,
    typer.Option("--model", metavar="NAME", help="Of several models: which one.", show_default="the first"),
]

TimeoutS = Annotated[float | None, typer.Option("--timeout-s", min=0.001, help="Deadline of each request.")]


def security(context: typer.Context) -> Security:
    """The TLS files and the token given by the options before the command."""
    found = context.find_object(Security)
    return found if found is not None else Security()


def with_token(command: str, *, needed: bool) -> str:
    """A command to type, with a token's place in front if one is needed."""
    return f"PACELINE_TOKEN=... {command}" if needed else command


def fail(message: str, status: int = 1) -> NoReturn:
    """Print one line to stderr and exit with `status`."""
    sys.stdout.flush()
    stderr.print(f"[bold red]paceline:[/] {escape(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(status)


def warn(message: str) -> None:
    """Print one line to stderr."""
    stderr.print(f"[yellow]paceline: warning:[/] {escape(message)}", highlight=False, soft_wrap=True)


class _Notes(logging.Handler):
    """Prints a line when the SDK waits for a scheduler that goes on with a call."""

    def emit(self, record: logging.LogRecord) -> None:
        before = "\n" if sys.stdout.isatty() else ""  # after the part of an answer's line
        note = f"{before}[dim]{escape(record.getMessage())}[/]"
        stderr.print(note, highlight=False, soft_wrap=True)


@contextmanager
def _notes() -> Iterator[None]:
    log, notes = logging.getLogger("paceline"), _Notes(logging.INFO)
    log.setLevel(logging.INFO)
    log.addHandler(notes)
    try:
        yield
    finally:
        log.removeHandler(notes)


@contextmanager
def one_line_errors(security: Security, address: str) -> Iterator[None]:
    """A context manager: prints an expected error as one line with advice, and exits with status 1."""
    try:
        with _notes():
            yield
    except BrokenPipeError:  # the reader of the output has left, as `| head` does: not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except _EXPECTED as error:
        fail(advice(security, error, address))
    except BaseExceptionGroup as group:  # from a TaskGroup
        first = _first(group)
        if not isinstance(first, _EXPECTED):
            raise
        fail(advice(security, first, address))


@contextmanager
def client_of(context: typer.Context, addresses: Sequence[str]) -> Iterator[Client]:
    """A context manager: a client of these schedulers, with `one_line_errors`."""
    from paceline.client import Client  # imported late: commands that serve need none

    secured = security(context)
    with one_line_errors(secured, ", ".join(addresses)), Client(addresses, security=secured) as client:
        try:
            yield client
        except errors.InvalidRequest as error:
            fail(_by_option(context, str(error)))
        except errors.NotFound as error:
            fail(f"{error}{_elsewhere(context)}")


def _elsewhere(context: typer.Context) -> str:
    """At what other port of this machine the model of --model is served, as the end of a sentence."""
    from paceline.cli.running_stacks import running_stacks  # imported late: it is seldom needed

    model = context.params.get("model")
    stacks = running_stacks(security(context).token) if model else ()
    ports = [one.port for one in stacks if one.model == model]
    return f"; port {ports[0]} of this machine has it" if ports else ""


def _by_option(context: typer.Context, message: str) -> str:
    """The message of an InvalidRequest, with the command's option in place of the SDK's argument."""
    name = _ARGUMENT.match(message)
    if name is None:
        return message
    options = {option for parameter in context.command.params for option in parameter.opts}
    option = _OPTIONS.get(name[0]) or "--" + name[0].replace("_", "-")
    return option + message[name.end() :] if option in options else message


def run(security: Security, main: Coroutine[object, object, _T], address: str) -> _T:
    """Run an asyncio command with `one_line_errors`. Ctrl-C exits with status 130 and no message."""
    with one_line_errors(security, address):
        try:
            return asyncio.run(main)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def advice(security: Security, error: BaseException, address: str) -> str:
    """One line for the user: the error, and what to do about it."""
    match error:
        case ChildFailed():
            return error.message  # its last line of output is printed already
        case errors.Unavailable() if _unreachable(error):
            return _no_connection(security, error, address)
        case errors.RetryLater(retry_after_s=after) if after:
            return f"{error}; try again in {after:g} s"
        case errors.Unauthenticated():
            return f"{error}. Give the token with PACELINE_TOKEN, or --token before the command"
        case errors.DeadlineExceeded():
            return f"{error}; give more with --timeout-s"
        case errors.Unsupported() if error.reason:
            return f"{address} does not offer this: {error}"
        case errors.Unsupported():
            return f"{address} does not offer this: is it a Paceline scheduler? ({error})"
        case errors.InternalError():
            return f"the service failed: {error}"
        case _:
            return str(error)


def _no_connection(security: Security, error: errors.Unavailable, addresses: str) -> str:
    """What is in the way at the first of the addresses, as `paceline doctor` finds it, and what to do."""
    from paceline.cli.diagnosis import Verdict, connection_problem  # imported late: most commands connect
    from paceline.cli.scratch import what_runs

    address = addresses.split(", ")[0]
    if ":" not in address:  # the services that a command has started
        return f"{address}: {error}"
    found = connection_problem(address, security, _PROBE_TIMEOUT_S)
    if found is None:
        return f"{address}: {error}; `paceline doctor` says more"
    problem = f"{found.verdict.value}: {found.detail}; {found.advice}"
    return f"{problem}. {what_runs()}" if found.verdict is Verdict.NOBODY else problem


def _unreachable(error: errors.Unavailable) -> bool:
    """Whether the error comes from gRPC alone: errors of a service have a reason or a retry hint."""
    return not error.reason and error.retry_after_s is None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception in nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def require_writable(path: Path | None, option: str) -> None:
    """Exit with an error if this file could not be written. `option` names it; None is nothing to write."""
    if path is None:
        return
    problem = 0
    if path.is_dir():
        problem = errno.EISDIR
    elif not path.parent.is_dir():
        problem = errno.ENOENT
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = errno.EACCES
    if problem:
        fail(f"{option}: {path}: {os.strerror(problem)}", 2)
