"""`paceline executor` and `paceline scheduler`: one service, in this process.

Also the command lines of services. The command line never imports a service, so that clients do not load
torch, and a crash of a service does not affect them.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import typer

from paceline.cli.client_options import refuse_ignored_token
from paceline.cli.common import fail
from paceline.extras import installation

_EXTRAS = {"executor_service": "executor", "scheduler_service": "scheduler", "uvicorn": "openai"}


def command(module: str, *arguments: str) -> list[str]:
    """The command line of a service. Exits with advice if it is not installed."""
    require(module)
    return [sys.executable, "-m", module, *arguments]


def require(module: str) -> None:
    """Exit with advice if a module of an extra is not installed."""
    if find_spec(module) is None:
        fail(f"{module} is not installed; {installation(_EXTRAS[module])}")


def executor(context: typer.Context) -> None:
    """Run an executor here; `paceline executor --help` lists its own options."""
    refuse_ignored_token(context, "executor")
    _replace_process(command("executor_service", *context.args))


def scheduler(context: typer.Context) -> None:
    """Run a scheduler here; `paceline scheduler --help` lists its own options."""
    refuse_ignored_token(context, "scheduler")
    _replace_process(command("scheduler_service", *context.args))


def _replace_process(arguments: list[str]) -> None:
    sys.stdout.flush()
    os.execv(arguments[0], arguments)
