"""Settings of the gateway. Bounds are of one process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints


@dataclass(frozen=True, slots=True)
class Bounds:
    """What strangers may cost: the gateway's memory is bounded by these."""

    max_body_bytes: int = 8 << 20  # of one request; escapes make 1 MiB of text 6
    max_bodies_bytes: int = 32 << 20  # of all bodies that are being read; half of it for one caller
    max_header_bytes: int = 32 << 10  # of one request, its target included
    max_headers: int = 100
    max_connections: int = 4096
    max_connection_requests: int = 10_000  # then the connection is closed
    header_timeout_s: float = (
        10.0  # from the first byte of a request, and of a connection, to the headers' end
    )
    body_timeout_s: float = 30.0
    idle_timeout_s: float = 60.0  # between two requests of a connection
    stall_timeout_s: float = 30.0  # a client that reads nothing of its answer


def _flag(about: str, **kind: Any) -> dict[str, Any]:
    """The flag of a setting, for argparse: the help, and what is not a text."""
    return {"help": about, **kind}


def _switch(about: str) -> dict[str, Any]:
    return _flag(about, action="store_true")


def _file(about: str) -> dict[str, Any]:
    return _flag(about, type=Path)


@dataclass(frozen=True, slots=True)
class Settings:
    """One gateway process. Those with a note have a flag."""

    scheduler: Annotated[
        tuple[str, ...],
        _flag("address of a scheduler; several serve the same model",
              action="append", required=True, metavar="ADDRESS"),
    ]  # fmt: skip
    host: Annotated[
        str,
        _flag("address to listen on; beyond loopback with TLS or --insecure, and tokens at the schedulers"),
    ] = "127.0.0.1"
    port: Annotated[
        int, _flag("port to listen on; 0: any free one. Several processes may share it", type=int)
    ] = 0
    port_file: Annotated[Path | None, _file("write the port here once listening")] = None
    local_socket: Annotated[Path | None, _file("listen on this Unix socket too, in plaintext")] = None
    tls_cert: Annotated[Path | None, _file("PEM certificate chain; read again when the file changes")] = None
    tls_key: Annotated[Path | None, _file("its PEM key")] = None
    scheduler_ca: Annotated[
        Path | None, _file("authority of the schedulers' certificates; turns TLS to them on")
    ] = None
    scheduler_cert: Annotated[Path | None, _file("this gateway's own certificate for them")] = None
    scheduler_key: Annotated[Path | None, _file("the key of that certificate")] = None
    model_name: Annotated[
        str, _flag("what clients may call the model, and see as its name; default: its own name")
    ] = ""
    cors_origin: Annotated[
        tuple[str, ...], _flag("origin of web pages that may call; * for all; repeatable", action="append")
    ] = ()
    log_level: Annotated[
        str, _flag("lowest severity that is logged", choices=("debug", "info", "warning", "error"))
    ] = "warning"
    log_format: Annotated[
        str, _flag("auto: console on a terminal, else json", choices=("auto", "json", "console"))
    ] = "auto"
    insecure: Annotated[bool, _switch("allow plaintext beyond loopback")] = False
    until_stdin_ends: Annotated[bool, _switch("end when standard input ends")] = False
    otel: Annotated[bool, _switch("send spans by OTLP over gRPC, as OTEL_* say")] = False
    bounds: Bounds = Bounds()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parser() -> argparse.ArgumentParser:
    """The command line of a gateway process. A flag that is not given is not there."""
    found = _Parser(
        prog="python -m paceline_openai",
        description="The OpenAI API, by calls of schedulers.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for name, kind in get_type_hints(Settings, include_extras=True).items():
        for flag in getattr(kind, "__metadata__", ()):
            found.add_argument(_name(name), **flag)
    for one in fields(Bounds):
        found.add_argument(_name(one.name), type=type(one.default), help=f"default {one.default}")
    return found


def settings(arguments: Sequence[str] | None = None) -> Settings:
    """The settings of a command line. Raises ValueError for one that is wrong."""
    reading = parser()
    given = vars(reading.parse_args(arguments))
    bounds = {one.name: given.pop(one.name) for one in fields(Bounds) if one.name in given}
    for name, value in bounds.items():
        if not value > 0:
            reading.error(f"{_name(name)}: expected more than 0, got {value}")
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    found = Settings(**given | lists, bounds=Bounds(**bounds))
    if (found.tls_cert is None) != (found.tls_key is None):
        reading.error("--tls-cert and --tls-key go together")
    if not 0 <= found.port <= 65535:
        reading.error(f"--port: expected 0 to 65535, got {found.port}")
    return found


def _name(field: str) -> str:
    return f"--{field.replace('_', '-')}"
