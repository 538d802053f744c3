"""A service's command line as people read and write it: names of types, defaults, values of switches."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")

_KINDS = {
    "Path": "PATH",
    "int": "N",
    "float": "NUMBER",
    "str": "TEXT",
    "ByteSize": "SIZE",
    "tuple[str,...]": "TEXT",
    "dict[str,str]": "NAME=VALUE",
}
"""What --help calls a value, by its Python type."""
_UNITS = {"s": "SECONDS", "ms": "MS", "us": "US", "mib": "MIB", "bytes": "BYTES"}
"""The same by the last word of a flag's name."""
_FLAGS = {
    "--executor": "HOST:PORT",
    "--draft-executor": "HOST:PORT",
    "--adapter": "NAME[=DIRECTORY]",
    "--host": "HOST",
    "--metrics-host": "HOST",
    "--port": "PORT",
    "--metrics-port": "PORT",
    "--speculation": "off|auto|N",
}
_LIST = re.compile(r"\(default: \((.*)\)\)$")
_NOTHING = re.compile(r" ?\(default: (None|False|\(\))?\)$| \(default factory: dict\)$")


class Parser(argparse.ArgumentParser):
    """Parses the flags of a service. Mistakes are one line on stderr, and exit status 2."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(
            prog=program,
            usage=f"{program} [--NAME VALUE]...",
            description=description,
            epilog="Switches take a value too: --insecure=false. SIZE: bytes, or as in 512MiB or 2GiB."
            " All settings can be variables, or keys of the file of --config.",
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Exit without the list of all flags, in which the message would be lost."""
        self.exit(2, f"{self.prog}: {message}\n")


def add_argument(parser: argparse.ArgumentParser, *flags: str, **options: Any) -> argparse.Action:
    """As `parser.add_argument`, with names that people know instead of those of Python's types."""
    kind = options.get("metavar")
    if isinstance(kind, str):
        options["metavar"] = _shown(flags[-1], kind)
    if isinstance(text := options.get("help"), str):
        options["help"] = _LIST.sub(_listed, _NOTHING.sub("", text))
    return parser.add_argument(*flags, **options)


def with_plain_switches(arguments: Sequence[str], fields: Collection[str]) -> tuple[list[str], list[str]]:
    """The arguments with `--name=true` as `--name` and `--name=false` as `--no-name`; and error messages.

    `fields`: names of the switches. A message is given for each value that is neither true nor false.
    """
    switches = {f"--{field.replace('_', '-')}" for field in fields}
    plain, problems = [], []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if not equals or flag not in switches:
            plain.append(argument)
        elif value.lower() in _TRUE:
            plain.append(flag)
        elif value.lower() in _FALSE:
            plain.append(f"--no-{flag[2:]}")
        else:
            problems.append(f"{flag}: expected true or false, got {value!r}")
    return plain, problems


def _shown(flag: str, kind: str) -> str:
    if kind.startswith("{"):
        return kind.strip("{}").replace(",", "|")
    unit = _UNITS.get(flag.rpartition("-")[2]) if kind in ("int", "float") else None
    return _FLAGS.get(flag) or unit or _KINDS.get(kind, kind)


def _listed(found: re.Match[str]) -> str:
    items = [item.strip(" '") for item in found[1].split(",")]
    return f"(default: {', '.join(item for item in items if item)})"
