"""The process of the OpenAI gateway: `smg`, with settings that suit Paceline's schedulers as its workers.

`paceline serve --openai` and `paceline gateway` start it: `python -m paceline.cli.gateway_process`. Standard
input begins with a line of secrets, and the process ends when it ends. Keys are handed to smg within this
process, so they are on no command line. Nobody has the key of smg's control plane, which adds and removes
workers.
"""

from __future__ import annotations

import argparse
import io
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from service_kit.parent import STDIN
from service_kit.process import write_port_file
from service_kit.secrets import read_secrets
from service_kit.security import ServerSecurity, check_tls_files
from service_kit.settings import EXIT_USAGE

from paceline.cli.gateway_probe import probe_status

_POLL_S = 0.05
_LOOPBACK = "127.0.0.1"

SETTINGS = (
    ("--backend", "vllm"),  # the workers' protocol
    # A worker that hangs or says that it is not healthy gets no new requests from the next check on.
    ("--health-check-interval-secs", "2"),
    ("--health-check-timeout-secs", "2"),
    ("--health-failure-threshold", "1"),
    ("--health-success-threshold", "1"),
    ("--worker-startup-check-interval", "1"),
    # A request that has not begun is sent to another worker, or again: 0.1, 0.2, 0.4, 0.8 s later.
    ("--retry-max-retries", "5"),
    ("--retry-initial-backoff-ms", "100"),
    ("--retry-max-backoff-ms", "2000"),
    ("--retry-backoff-multiplier", "2"),
    # The circuit breaker keeps requests from a worker until the next health check, and not for a minute.
    ("--cb-success-threshold", "1"),
    ("--cb-timeout-duration-secs", "2"),
    # Fewer than the calls that a scheduler takes on one connection, so that health checks always get through.
    ("--max-concurrent-requests", "4000"),
    ("--shutdown-grace-period-secs", "30"),  # the scheduler's --drain-timeout-s
    ("--max-payload-size", str(16 << 20)),  # bytes; smg reads up to 512 MiB by default
)
"""smg's settings that differ from its own defaults. Options of the command line come after these, and win."""

_FILES = (
    "server_cert_path",
    "server_key_path",
    "client_cert_path",
    "client_key_path",
    "ca_cert_paths",
    "mcp_config_path",
    "chat_template",
    "storage_hook_wasm_path",
    "discovery_file",
    "mesh_tls_ca_cert",
    "mesh_tls_cert",
    "mesh_tls_key",
)
"""smg's settings that name files which it reads."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run smg until it is stopped; returns the exit status."""
    given, options = _parser().parse_known_args(arguments)
    try:
        key = read_secrets(("api_key",)).get("api_key", "")
        settings = _settings(given, options, key)
    except (ValueError, TypeError) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        print(f"gateway: can't listen at {given.host}:{given.port}: {error.strerror}", file=sys.stderr)
        return 1
    if given.check:
        return 0
    _in_background(_end_with_parent)
    tls = settings.server_cert_path is not None
    _in_background(partial(_tell_port, settings.host, settings.port, given.port_file, tls=tls))
    try:
        _start(settings)
    except (RuntimeError, ValueError) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paceline.cli.gateway_process",
        description="Further options are those of `smg launch`.",
        allow_abbrev=False,
    )
    parser.add_argument("--host", default=_LOOPBACK, help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: any free one")
    parser.add_argument("--port-file", type=Path, help="write the port here once listening")
    parser.add_argument(
        "--worker", action="append", required=True, help="HOST:PORT of a scheduler's gateway port"
    )
    parser.add_argument("--check", action="store_true", help="check the options, and end")
    return parser


def _settings(given: argparse.Namespace, options: Sequence[str], key: str) -> Any:
    """smg's settings. Raises ValueError, and OSError if the port is taken."""
    ours = [word for setting in SETTINGS for word in setting]
    ours += ["--prometheus-host", _LOOPBACK, "--prometheus-port", str(_free_port(_LOOPBACK))]
    settings = _parsed([*ours, *options])
    if settings.api_key or settings.control_plane_api_keys or settings.tenant_api_keys:
        raise ValueError("a key among smg's options would show in the process list: give --api-key-file")
    _check_files(settings)
    return replace(
        settings,
        host=given.host,
        port=_free_port(given.host, given.port),
        worker_urls=[f"grpc://{worker}" for worker in given.worker],
        api_key=key or None,
        # (id, name, key, role): without one the control plane is open to everybody
        control_plane_api_keys=[("closed", "closed", secrets.token_urlsafe(32), "admin")],
    )


def _parsed(options: list[str]) -> Any:
    """smg's settings. Raises ValueError for options that it does not have."""
    from smg.launch_router import parse_router_args  # --help needs no smg

    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return parse_router_args(options)
    except SystemExit:  # it prints 200 lines of usage, and then what is wrong
        problem = said.getvalue().rpartition("error: ")[2].strip()
        raise ValueError(f"{problem} (`smg launch --help` lists the options)") from None


def _check_files(settings: Any) -> None:
    """Raises ValueError for a file that can't be read or is no certificate. smg tells it when it starts."""
    for name in _FILES:
        given = getattr(settings, name) or []
        for path in [given] if isinstance(given, str) else given:
            try:
                with open(path, "rb"):
                    pass
            except OSError as error:
                flag = name.replace("server_", "tls_").replace("_", "-")
                raise ValueError(f"--{flag}: {path}: {error.strerror}") from error
    if settings.server_cert_path and settings.server_key_path:
        check_tls_files(ServerSecurity(Path(settings.server_cert_path), Path(settings.server_key_path)))


def _start(settings: Any) -> None:
    """Run smg until a signal. Raises RuntimeError, ValueError."""
    from smg.router import Router

    Router.from_args(settings).start()


def _free_port(host: str, port: int = 0) -> int:
    """The port, or for 0 any one, that is free at this moment. Raises OSError if it is taken.

    smg can't choose one by itself. If another server had the port, its answers would be taken for smg's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that end are no server
        probe.bind((host, port))
        found: int = probe.getsockname()[1]
        return found


def _in_background(function: Callable[[], None]) -> None:
    threading.Thread(target=function, daemon=True).start()


def _end_with_parent() -> None:
    """Stop this process when its standard input ends: its parent has ended."""
    while os.read(STDIN, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _tell_port(host: str, port: int, port_file: Path | None, *, tls: bool) -> None:
    """Write the port file once smg answers. `tls`: as for `probe_status`."""
    while probe_status(host, port, "/liveness", tls=tls) is None:
        time.sleep(_POLL_S)
    if port_file is not None:
        write_port_file(port_file, port)


if __name__ == "__main__":
    sys.exit(main())
