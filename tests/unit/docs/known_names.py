"""What commands, flags, settings and variables there are, asked of the programs themselves."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from paceline.cli.app import app
from paceline.cli.models.directories import MODELS_VARIABLE
from service_kit.settings import ServiceSettings
from typer.core import TyperGroup, TyperOption
from typer.main import get_command

from executor_service.config import ExecutorConfig
from scheduler_service.config import SchedulerSettings
from tests.unit.docs.pages import ROOT

SERVICES: dict[str, type[ServiceSettings]] = {"executor": ExecutorConfig, "scheduler": SchedulerSettings}
MODULES = {"executor_service": "executor", "scheduler_service": "scheduler"}
SETTINGS_OF = {
    "-E": "executor",
    "--executor-option": "executor",
    "-D": "executor",
    "--draft-option": "executor",
    "-S": "scheduler",
    "--scheduler-option": "scheduler",
}
"""Options that hand a NAME=VALUE to a service."""


def settings(service: str) -> set[str]:
    """Names of a service's settings, as flags have them, without dashes before them."""
    return {name.replace("_", "-") for name in SERVICES[service].model_fields}


def service_flags(service: str) -> set[str]:
    """Flags of a service."""
    fields = SERVICES[service].model_fields.items()
    switches = {f"--no-{name.replace('_', '-')}" for name, field in fields if field.annotation is bool}
    return {"--help", *switches, *(f"--{name}" for name in settings(service))}


@cache
def cli() -> TyperGroup:
    """The `paceline` command."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    return group


def cli_flags(command: Any) -> set[str]:
    """Flags of a command, as its --help lists them."""
    options = (one for one in command.params if isinstance(one, TyperOption))
    return {"--help", "-h", *(flag for one in options for flag in (*one.opts, *one.secondary_opts))}


def variables() -> set[str]:
    """Environment variables that something reads."""
    names = {f"PACELINE_{service}_{name}".upper() for service in SERVICES for name in _fields(service)}
    names.add(MODELS_VARIABLE)
    for command in (cli(), *cli().commands.values()):
        for parameter in command.params:
            given = parameter.envvar or ()
            names.update([given] if isinstance(given, str) else given)
    return names


def make_targets() -> set[str]:
    """Targets that stand in the Makefile."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _fields(service: str) -> set[str]:
    return set(SERVICES[service].model_fields)
