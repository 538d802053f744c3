"""How to start the OpenAI gateway, from the options of `serve` and `gateway`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from service_kit.secrets import check_token
from service_kit.security import read_token

from paceline.channel import is_loopback
from paceline.cli.common import fail, warn
from paceline.cli.services import command, require
from paceline.cli.stack_secrets import gateway_line
from paceline.cli.supervisor import Child, ChildFailed, Say
from paceline.cli.watch import watch_gateway

API_KEY_VARIABLE = "PACELINE_API_KEY"
_PROCESS = "paceline.cli.gateway_process"
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_LOG_LEVELS = {"debug": "debug", "info": "info"}
"""smg's level by ours; otherwise its errors alone, since it warns of what is as it should be here."""
_PARSERS = {"hermes": "qwen", "llama3-json": "llama", "llama3-pythonic": "pythonic"}
"""smg's parsers of calls, by our names of the formats."""

ApiKey = Annotated[
    str,
    typer.Option(
        envvar=API_KEY_VARIABLE,
        help="OpenAI clients must send this key. Shows in the process list: better set the variable.",
        show_default=False,
    ),
]
ApiKeyFile = Annotated[
    Path | None, typer.Option(help="OpenAI clients must send this file's key.", show_default=False)
]
GatewayOption = Annotated[
    list[str] | None,
    typer.Option("--gateway-option", "-G", metavar="NAME=VALUE", help="See `smg launch --help`."),
]


@dataclass(frozen=True, slots=True)
class GatewayLaunch:
    """The gateway to start. `options` are further flags of smg's command line."""

    host: str
    port: int  # 0: any free one
    api_key: str = field(default="", repr=False)  # clients must send it; "": they need none
    model_name: str = ""  # for its clients; "": the model's own
    options: tuple[str, ...] = ()

    @property
    def tls(self) -> bool:
        """Whether it serves TLS."""
        return any(option.startswith("--tls-cert-path") for option in self.options)

    def child(self, directory: Path, say: Say, workers: Sequence[str], *, tool_format: str = "") -> Child:
        """Its process, not started. `workers`: host:port of schedulers; `tool_format`: of their model."""
        parser = _PARSERS.get(tool_format)
        options = [*(["--tool-call-parser", parser] if parser else []), *self.options]
        port_file = directory / "gateway"

        def with_port(port: int) -> list[str]:
            flags = [flag for worker in workers for flag in ("--worker", worker)]
            where = ["--host", self.host, "--port", str(port), "--port-file", str(port_file)]
            return command(_PROCESS, *flags, *where, *options)

        child: Child = Child(
            "gateway",
            with_port,
            port_file,
            lambda name, line: say(name, _COLOR.sub("", line)),
            secrets=gateway_line(self.api_key),
            watch=watch_gateway(self.host, lambda: child.port, tls=self.tls),
        )
        return child

    async def check(self) -> None:
        """Have the options checked by a process of its own, which ends then. Raises ChildFailed.

        For where the gateway itself is started after a model is loaded.
        """
        flags = ["--check", "--host", self.host, "--worker", "127.0.0.1:1", *self.options]
        process = await asyncio.create_subprocess_exec(
            *command(_PROCESS, *flags),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate(gateway_line(self.api_key))
        if process.returncode:
            *_, last = ["it said nothing", *said.decode(errors="replace").splitlines()]
            raise ChildFailed(f"the gateway ended (exit status {process.returncode}): {last}")

    def url(self, port: int) -> str:
        """The base URL for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        scheme = "https" if self.tls else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1"


def gateway_launch(
    listen: str,
    api_key: str,
    *,
    insecure: bool,
    log_level: str,
    options: Sequence[str] = (),
    model_name: str = "",
) -> GatewayLaunch:
    """The gateway to start at `listen`, [HOST:]PORT. Exits with an error for options that do not fit.

    `options`: flags of smg's. Beyond loopback a key is required, and TLS unless `insecure`.
    """
    require("smg")
    found = re.fullmatch(r"(?:(.+):)?(\d{1,5})", listen)
    if found is None or int(found[2]) > 65535:
        fail(f"expected PORT or HOST:PORT for the gateway, got {listen!r}", 2)
    host = (found[1] or "127.0.0.1").removeprefix("[").removesuffix("]")
    level = _LOG_LEVELS.get(log_level, "error")
    launch = GatewayLaunch(host, int(found[2]), api_key, model_name, ("--log-level", level, *options))
    if not is_loopback(f"{host}:0"):
        if not api_key:
            fail(
                f"{host} is not loopback: give a key with --api-key-file FILE or {API_KEY_VARIABLE}",
                2,
            )
        if not launch.tls and not insecure:
            fail(f"{host} is not loopback: give -G tls-cert-path=FILE -G tls-key-path=FILE, or --insecure", 2)
    return launch


def shows_api_key(context: typer.Context) -> bool:
    """Whether the key is on the command line, and not in its variable."""
    source = context.get_parameter_source("api_key")
    return source is not None and source.name == "COMMANDLINE"


def checked_api_key(context: typer.Context, api_key: str, file: Path | None) -> str:
    """The key of the option, the variable or the file; "": none. Exits with an error if they differ."""
    if shows_api_key(context):
        warn(f"--api-key shows in the process list of this machine; {API_KEY_VARIABLE} does not")
    try:
        from_file = read_token(file)
        check_token("--api-key", api_key)
    except ValueError as error:
        fail(str(error), 2)
    if api_key and from_file and api_key != from_file:
        fail("--api-key-file names another key than --api-key or its variable: give one of them", 2)
    return from_file or api_key
