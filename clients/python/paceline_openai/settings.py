"""Settings of the gateway. Bounds are of one process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn


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


@dataclass(frozen=True, slots=True)
class Settings:
    """One gateway process. `schedulers`: their addresses."""

    schedulers: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 0
    port_file: Path | None = None
    local_socket: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    scheduler_ca: Path | None = None
    scheduler_cert: Path | None = None
    scheduler_key: Path | None = None
    insecure: bool = False
    until_stdin_ends: bool = False
    otel: bool = False
    model_name: str = ""  # what clients may call the model, and see as its name; "": its own name
    cors_origin: tuple[str, ...] = ()  # origins of pages that may call; "*": all
    log_level: str = "warning"
    log_format: str = "auto"
    bounds: Bounds = Bounds()


_HELP = {
    "scheduler": "address of a scheduler; several serve the same model",
    "host": "address to listen on; beyond loopback with TLS or --insecure, and tokens at the schedulers",
    "port": "port to listen on; 0: any free one. Several processes may share it",
    "port_file": "write the port here once listening",
    "local_socket": "listen on this Unix socket too, in plaintext",
    "tls_cert": "PEM certificate chain; read again when the file changes",
    "tls_key": "its PEM key",
    "scheduler_ca": "authority of the schedulers' certificates; turns TLS to them on",
    "scheduler_cert": "this gateway's own certificate for them",
    "scheduler_key": "the key of that certificate",
    "model_name": "what clients may call the model, and see as its name; default: its own name",
    "cors_origin": "origin of web pages that may call; * for all; repeatable",
    "log_level": "debug, info, warning or error",
    "log_format": "auto, json or console",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parser() -> argparse.ArgumentParser:
    """The command line of a gateway process."""
    found = _Parser(
        prog="python -m paceline_openai",
        description="The OpenAI API, by calls of schedulers.",
        allow_abbrev=False,
    )
    found.add_argument(
        "--scheduler", action="append", required=True, metavar="ADDRESS", help=_HELP["scheduler"]
    )
    found.add_argument("--host", default="127.0.0.1", help=_HELP["host"])
    found.add_argument("--port", type=int, default=0, help=_HELP["port"])
    for name in (
        "port_file",
        "local_socket",
        "tls_cert",
        "tls_key",
        "scheduler_ca",
        "scheduler_cert",
        "scheduler_key",
    ):
        found.add_argument(_flag(name), type=Path, help=_HELP[name])
    found.add_argument("--model-name", default="", help=_HELP["model_name"])
    found.add_argument("--cors-origin", action="append", default=[], help=_HELP["cors_origin"])
    found.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="warning")
    found.add_argument("--log-format", choices=("auto", "json", "console"), default="auto")
    found.add_argument("--insecure", action="store_true", help="allow plaintext beyond loopback")
    found.add_argument("--until-stdin-ends", action="store_true", help="end when standard input ends")
    found.add_argument("--otel", action="store_true", help="send spans by OTLP over gRPC, as OTEL_* say")
    for field in fields(Bounds):
        found.add_argument(
            _flag(field.name),
            type=type(field.default),
            default=field.default,
            help=f"default {field.default}",
        )
    return found


def settings(arguments: Sequence[str] | None = None) -> Settings:
    """The settings of a command line. Raises ValueError for one that is wrong."""
    reading = parser()
    given: dict[str, Any] = vars(reading.parse_args(arguments))
    bounds = {field.name: given.pop(field.name) for field in fields(Bounds)}
    for name, value in bounds.items():
        if value <= 0:
            reading.error(f"{_flag(name)}: expected more than 0, got {value}")
    if (given["tls_cert"] is None) != (given["tls_key"] is None):
        reading.error("--tls-cert and --tls-key go together")
    if not 0 <= given["port"] <= 65535:
        reading.error(f"--port: expected 0 to 65535, got {given['port']}")
    return Settings(
        schedulers=tuple(given.pop("scheduler")),
        cors_origin=tuple(given.pop("cors_origin")),
        bounds=Bounds(**bounds),
        **given,
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
