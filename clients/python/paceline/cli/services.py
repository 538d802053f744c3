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

_EVERY_SERVICE = ("executor_service", "scheduler_service", "grpc_health", "pydantic_settings", "numpy")
_TORCH = ("torch", "numba", "gguf", "safetensors")


def command(module: str, *arguments: str) -> list[str]:
    """The command line of a service. Exits with advice if it is not installed."""
    require(module)
    return [sys.executable, "-m", module, *arguments]


def require(module: str) -> None:
    """Exit with advice if a module of an extra is not installed."""
    if find_spec(module) is None:
        fail(f"{module} is not installed; {installation(_EXTRAS[module])}")


def require_services(backend: str) -> None:
    """Exit with advice if something is not installed that an executor with this backend or a scheduler needs.

    Called before either is started: there it would be a traceback of each.
    """
    for package in (*_EVERY_SERVICE, *(_TORCH if backend == "torch" else ())):
        if find_spec(package) is None:
            fail(f"{package} is not installed, which this command needs; {installation('all')}")


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
