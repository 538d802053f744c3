"""How to start the gateway of the OpenAI API, from the options of `serve` and `gateway`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from paceline.channel import is_loopback
from paceline.cli.common import fail, stderr
from paceline.cli.services import command, require
from paceline.cli.supervisor import Child, Say
from paceline.cli.watch import watch_gateway

_PACKAGE = "paceline_openai"
_GONE_VARIABLE = "PACELINE_API_KEY"
_KEYS = (
    "a caller's key is its token at the scheduler now: give --token-file FILE, PACELINE_TOKEN, or"
    " -S tokens-file=FILE for keys of several callers"
)
_GONE_OPTIONS = {
    "tls-cert-path": "tls-cert",
    "tls-key-path": "tls-key",
    "max-payload-size": "max-body-bytes",
    "cors-allowed-origins": "cors-origin",
    "policy": "nothing: requests are spread over the schedulers",
    "tool-call-parser": "-S tool-format=NAME",
    "reasoning-parser": "nothing: the scheduler reads the model's own format",
    "prometheus-port": "nothing: the metrics are at /metrics of the gateway's port",
}
"""Options of the gateway that was another program, and what they are called now."""

GoneApiKey = Annotated[str, typer.Option("--api-key", hidden=True)]
GoneApiKeyFile = Annotated[str, typer.Option("--api-key-file", hidden=True)]
Processes = Annotated[
    int,
    typer.Option(
        "--gateway-processes", min=1, max=64, help="Processes of the OpenAI API, which share its port."
    ),
]
GatewayOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gateway-option", "-G", metavar="NAME=VALUE", help="See `python -m paceline_openai --help`."
    ),
]


@dataclass(frozen=True, slots=True)
class GatewayLaunch:
    """The gateway to start. `options` are further flags of its command line."""

    host: str
    port: int  # 0: any free one
    processes: int = 1
    options: tuple[str, ...] = ()

    @property
    def tls(self) -> bool:
        """Whether it serves TLS."""
        return any(option.startswith("--tls-cert") for option in self.options)

    @property
    def names(self) -> list[str]:
        """Of its processes."""
        return ["gateway", *(f"gateway-{number}" for number in range(2, self.processes + 1))]

    def children(self, directory: Path, say: Say, schedulers: Sequence[str]) -> list[Child]:
        """Its processes, not started. `schedulers`: their addresses."""
        env = {"PROMETHEUS_MULTIPROC_DIR": str(directory / "metrics")} if self.processes > 1 else {}
        if env:
            (directory / "metrics").mkdir(exist_ok=True)
        return [self._child(name, directory, say, schedulers, env) for name in self.names]

    def _child(
        self, name: str, directory: Path, say: Say, schedulers: Sequence[str], env: dict[str, str]
    ) -> Child:
        port_file, socket = directory / name, directory / f"{name}.socket"

        def with_port(port: int) -> list[str]:
            where = ["--host", self.host, "--port", str(port), "--port-file", str(port_file)]
            own = [*where, "--local-socket", str(socket), "--until-stdin-ends"]
            return command(_PACKAGE, *(f"--scheduler={one}" for one in schedulers), *own, *self.options)

        return Child(name, with_port, port_file, say, env=env, watch=watch_gateway(socket))

    def url(self, port: int) -> str:
        """The base URL for clients on this machine."""
        return f"{self._root(port)}/v1"

    def announce(self, port: int, note: str = "") -> None:
        """Say on stderr where the API is, with `note` behind it, and where its chat page."""
        stderr.print(f"OpenAI API at [bold]{self.url(port)}[/]{note}", highlight=False, soft_wrap=True)
        stderr.print(f"Chat page at [bold]{self._root(port)}/[/]", highlight=False, soft_wrap=True)

    def _root(self, port: int) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        scheme = "https" if self.tls else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def gateway_launch(
    listen: str,
    *,
    insecure: bool,
    logs: Sequence[str],
    processes: int = 1,
    options: Sequence[str] = (),
    model_name: str = "",
    api_key: str = "",
) -> GatewayLaunch:
    """The gateway to start at `listen`, [HOST:]PORT. Exits with an error for options that do not fit.

    `options`: flags of its command line. `api_key`: what was given as a key, as in earlier versions.
    """
    require("uvicorn")
    if api_key or os.environ.get(_GONE_VARIABLE):
        fail(f"{'--api-key and --api-key-file are' if api_key else f'{_GONE_VARIABLE} is'} gone: {_KEYS}", 2)
    found = re.fullmatch(r"(?:(.+):)?(\d{1,5})", listen)
    if found is None or int(found[2]) > 65535:
        fail(f"expected PORT or HOST:PORT for the gateway, got {listen!r}", 2)
    host = (found[1] or "127.0.0.1").removeprefix("[").removesuffix("]")
    plain = ["--insecure"] if insecure else []
    name = [f"--model-name={model_name}"] if model_name else []
    launch = GatewayLaunch(host, int(found[2]), processes, (*logs, *plain, *name, *options))
    _check(launch)
    if not is_loopback(f"{host}:0") and not launch.tls and not insecure:
        fail(f"{host} is not loopback: give -G tls-cert=FILE -G tls-key=FILE, or --insecure", 2)
    return launch


def _check(launch: GatewayLaunch) -> None:
    """Exit with an error for a wrong option, before a model is loaded."""
    from paceline_openai.settings import settings  # needs packages of the extra

    for option in launch.options:
        name = option.partition("=")[0].removeprefix("--")
        if name in _GONE_OPTIONS:
            fail(f"-G {name} was an option of another gateway; now it is {_GONE_OPTIONS[name]}", 2)
    try:
        given = settings(["--scheduler=none", "--host", launch.host, *launch.options])
    except ValueError as error:
        fail(f"--gateway-option: {error}", 2)
    for file in (given.tls_cert, given.tls_key, given.scheduler_ca):
        if file is not None and not os.access(file, os.R_OK):
            fail(f"--gateway-option: {file} can't be read", 2)


def require_tokens(token: str, scheduler_flags: Sequence[str]) -> None:
    """Exit with an error where the scheduler demands certificates of its callers, and no token.

    The gateway's callers have none that the scheduler sees, and its own Unix socket demands none.
    """
    given = {flag.partition("=")[0] for flag in scheduler_flags}
    certificates = "--tls-client-ca" in given or os.environ.get("PACELINE_SCHEDULER_TLS_CLIENT_CA")
    if certificates and not token and not given & {"--tokens-file", "--auth-token-file"}:
        fail(
            "--openai: the scheduler demands certificates of callers, and the gateway's callers show none:"
            " give it tokens too (--token-file FILE, or -S tokens-file=FILE)",
            2,
        )
