"""`paceline gateway`: the OpenAI API in front of schedulers that run already, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.client_options import refuse_client_options
from paceline.cli.common import check_address, fail, security, stderr, warn
from paceline.cli.free_port import require_free
from paceline.cli.gateway_launch import (
    GatewayLaunch,
    GatewayOption,
    GoneApiKey,
    GoneApiKeyFile,
    Processes,
    gateway_launch,
)
from paceline.cli.gateway_probe import is_ready
from paceline.cli.log_writer import never_blocking
from paceline.cli.serve import say
from paceline.cli.served_model import flags
from paceline.cli.supervisor import Child, ChildFailed

_POLL_S = 0.5
_PATIENT_POLLS = 10  # before the gateway is said to have no scheduler yet


def gateway(
    context: typer.Context,
    schedulers: Annotated[list[str], typer.Argument(help="Each HOST:PORT.", metavar="ADDRESS...")],
    listen: Annotated[
        str, typer.Option(metavar="[HOST:]PORT", help="Where OpenAI clients connect.")
    ] = "8000",
    processes: Processes = 1,
    *,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow plaintext beyond loopback.")] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning, error.")] = "warning",
    gateway_option: GatewayOption = None,
    api_key: GoneApiKey = "",
    api_key_file: GoneApiKeyFile = "",
) -> None:
    """Serve the OpenAI API in front of schedulers of one model.

    Requests are spread over the schedulers, and a stream whose scheduler dies goes on at another one. A
    caller's key is its token there. --tls-ca before the command: who signed the schedulers' certificates.

        paceline gateway 127.0.0.1:50051 127.0.0.1:50052 --listen 8000
    """
    refuse_client_options(context, but=("tls_ca", "tls_cert", "tls_key"))
    given = security(context)
    launch = gateway_launch(
        listen,
        insecure=insecure,
        logs=("--log-level", log_level),
        processes=processes,
        options=[
            *_scheduler_tls(given.ca_file, given.cert_file, given.key_file),
            *flags(gateway_option, "-G"),
        ],
        api_key=api_key or api_key_file,
    )
    addresses = [check_address(one) for one in schedulers]
    require_free(launch.host, launch.port, "--listen")
    with never_blocking(stderr), tempfile.TemporaryDirectory(prefix="paceline-") as directory:
        children = launch.children(Path(directory), say, addresses)
        try:
            asyncio.run(_keep(children, launch, addresses, Path(directory)))
        except ChildFailed as error:
            fail(error.message)  # `say` has printed the last line
        except OSError as error:
            fail(str(error))


def _scheduler_tls(*files: Path | None) -> list[str]:
    names = ("ca", "cert", "key")
    return [f"--scheduler-{name}={file}" for name, file in zip(names, files, strict=True) if file]


async def start_all(children: Sequence[Child], port: int) -> None:
    """Start the gateway's processes; all have the port of the first. Raises ChildFailed."""
    for child in children:
        await child.start(port)
        port = child.port


async def _keep(
    children: Sequence[Child], launch: GatewayLaunch, schedulers: Sequence[str], directory: Path
) -> None:
    """Keep the gateway running until a signal. A second one ends it at once."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set() or not children[-1].port:
            for child in children:
                child.kill()
        else:
            stderr.print("[dim]letting running requests end; once more to stop at once[/]")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        await start_all(children, launch.port)
    except ChildFailed:
        if stop.is_set():
            return
        raise
    launch.announce(children[0].port, ". Ctrl-C stops.")
    keeping = [asyncio.create_task(child.keep_running()) for child in children]
    stopping = asyncio.create_task(stop.wait())
    telling = asyncio.create_task(tell_readiness(lambda: is_ready(directory / "gateway.socket"), schedulers))
    await asyncio.wait([*keeping, stopping], return_when=asyncio.FIRST_COMPLETED)
    telling.cancel()
    await asyncio.gather(*(child.stop() for child in children))
    await asyncio.gather(*keeping)


async def tell_readiness(
    ready: Callable[[], Awaitable[bool]], schedulers: Sequence[str], poll_s: float = _POLL_S
) -> None:
    """Say when the gateway takes requests and when it takes none, until cancelled.

    At a start it has some polls' time to find its schedulers before anything is said.
    """
    known = False
    for polls in count():
        now = await ready()
        if now and not known:
            stderr.print("Ready: a scheduler serves.", highlight=False)
        elif not now and (known or polls == _PATIENT_POLLS):
            warn(f"no scheduler serves at {', '.join(schedulers)}: requests are refused until one does")
        known = now
        await asyncio.sleep(poll_s)
