"""The commands of `paceline`, and the options before them."""

from __future__ import annotations

import errno
import inspect
import os
import shutil
import signal
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from service_kit.known import nearest
from typer.core import TyperCommand, TyperGroup

from paceline.channel import Security
from paceline.cli import (
    adapters,
    bench,
    chat,
    demo,
    doctor,
    embed,
    fleet,
    gateway,
    generate,
    loads,
    models_check,
    models_list,
    ps,
    pull,
    rerank,
    score,
    serve,
    services,
    status,
    steps,
    timeline,
    token,
    why,
)
from paceline.cli.client_options import note_command_line
from paceline.cli.common import fail, warn
from paceline.extras import installation

_WIDE = shutil.get_terminal_size().columns >= 60
"""Whether the terminal has room for the panels of --help; in fewer columns they cut off their own words."""


_UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # of the click that this typer uses


class _OneText(TyperCommand):
    """A command with one text, which users forget to quote."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            if "unexpected extra argument" in str(error):
                ctx.fail(f"{error}: put the text in quotes")
            raise


class _Serve(TyperCommand):
    """`serve`, whose users type settings of the services as if they were its own options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {"--help", *(name for one in self.params for name in (*one.opts, *one.secondary_opts))}
        for name in (arg.partition("=")[0] for arg in args):
            if name.startswith("--") and name not in {"--", *known} and not ctx.resilient_parsing:
                hint = nearest(name, known)
                end = "" if hint.endswith("?") else "."
                fail(
                    f"serve has no option {name}{hint}{end} Settings of the services are given as"
                    " -E name=value (executor) and -S name=value (scheduler)",
                    2,
                )
        return super().parse_args(ctx, args)


class _Commands(TyperGroup):
    """The commands. Ctrl-C ends one that does not take it itself without a message, with status 130.

    Before a command, while its error is printed, and at the end of the process it ends that at once.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        _flow(self)

    def invoke(self, ctx: Any) -> Any:
        before = signal.getsignal(signal.SIGINT)
        if before is signal.SIG_DFL:  # of `paceline.cli.main`
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        finally:
            if before is signal.SIG_DFL:
                signal.signal(signal.SIGINT, before)


def _flow(command: Any) -> None:
    """Let the terminal break the lines of the help, of commands below too; indented lines are examples."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    flowing = (one if one.startswith(" ") else one.replace("\n", " ") for one in paragraphs)
    command.help = "\n\n".join(flowing)
    for below in getattr(command, "commands", {}).values():
        _flow(below)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich" if _WIDE else None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Serve a language model over gRPC, and talk to it.

    `demo` shows everything at once. `serve` starts an executor, which computes, and a scheduler, which
    decides. The rest are clients of the scheduler.""",
)
_OURS = ("paceline", "service_kit", "executor_service", "scheduler_service")
_SERVERS = ("serve", "executor", "scheduler", "gateway")  # these refuse a client's options
_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app.command(rich_help_panel="Serve", cls=_Serve)(serve.serve)
app.command(rich_help_panel="Serve", context_settings=_PASS_THROUGH)(services.executor)
app.command(rich_help_panel="Serve", context_settings=_PASS_THROUGH)(services.scheduler)
app.command(rich_help_panel="Serve")(gateway.gateway)
app.command(rich_help_panel="Serve")(pull.pull)
app.command(hidden=True)(pull.model)
app.command("list", rich_help_panel="Serve")(models_list.list_models)
app.command("rm", rich_help_panel="Serve")(models_list.remove)
app.add_typer(models_check.models, name="models", rich_help_panel="Serve")
app.command(rich_help_panel="Serve")(ps.ps)
app.command(rich_help_panel="Serve")(loads.load)
app.command(rich_help_panel="Serve")(loads.unload)
app.command(rich_help_panel="Serve")(token.token)
app.add_typer(adapters.adapters, name="adapters", rich_help_panel="Serve")
app.add_typer(fleet.fleet, name="fleet", rich_help_panel="Serve")
app.command(rich_help_panel="Talk", cls=_OneText)(generate.generate)
app.command(rich_help_panel="Talk")(chat.chat)
app.command(rich_help_panel="Evaluate", cls=_OneText)(score.score)
app.command(rich_help_panel="Evaluate")(embed.embed)
app.command(rich_help_panel="Evaluate")(rerank.rerank)
app.command(rich_help_panel="Look")(status.status)
app.command(rich_help_panel="Look")(why.why)
app.command(rich_help_panel="Look")(timeline.timeline)
app.command(rich_help_panel="Look")(steps.steps)
app.command(rich_help_panel="Look")(doctor.doctor)
app.command(rich_help_panel="Look")(bench.bench)
app.command(rich_help_panel="Look")(demo.demo)


def _print_version(*, wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"paceline {version('paceline')}")
        except PackageNotFoundError:
            typer.echo("paceline (not installed)")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    token: Annotated[
        str,
        typer.Option(
            envvar="PACELINE_TOKEN",
            help="Sent with every call. Shows in the process list: better set the variable.",
            show_default=False,
        ),
    ] = "",
    tls_ca: Annotated[
        Path | None, typer.Option(envvar="PACELINE_TLS_CA", help="The server's authority; turns TLS on.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(envvar="PACELINE_TLS_CERT", help="This client's certificate.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(envvar="PACELINE_TLS_KEY", help="The key of this client's certificate.")
    ] = None,
    *,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """How to reach a scheduler safely; these stand before the command."""
    try:
        context.obj = given_security = Security(tls_ca, tls_cert, tls_key, token)
        given_security.check_files()
    except ValueError as error:
        fail(str(error), 2)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}", 2)
    given = note_command_line(context)
    if "token" in given and context.invoked_subcommand not in _SERVERS:
        warn("--token shows in the process list of this machine; PACELINE_TOKEN does not")


def run() -> None:
    """Parse the command line and run the command."""
    _open_standard_descriptors()
    try:
        app(prog_name="paceline")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in _OURS:
            raise
        _end(f"{package} is not installed, which this command needs; {installation('all')}")
    except OSError as error:
        if error.errno != errno.ENOSPC:  # the output's: commands speak of other files themselves
            raise
        _end(f"the output can't be written: {error.strerror}")


def _end(message: str) -> NoReturn:
    """As `fail`, outside of a command."""
    with suppress(typer.Exit):
        fail(message)
    sys.exit(1)


def _open_standard_descriptors() -> None:
    """Open /dev/null for closed standard descriptors: else a socket might get its number, and our logs."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
