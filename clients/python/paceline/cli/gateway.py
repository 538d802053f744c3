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
from paceline.cli.common import check_address, fail, stderr, warn
from paceline.cli.free_port import require_free
from paceline.cli.gateway_launch import (
    ApiKey,
    ApiKeyFile,
    GatewayLaunch,
    GatewayOption,
    checked_api_key,
    gateway_launch,
)
from paceline.cli.gateway_probe import is_ready
from paceline.cli.log_writer import never_blocking
from paceline.cli.serve import flags, say
from paceline.cli.supervisor import Child, ChildFailed

_POLL_S = 0.5
_PATIENT_POLLS = 10  # before the gateway is said to have no scheduler yet


def gateway(
    context: typer.Context,
    workers: Annotated[
        list[str], typer.Argument(help="Each scheduler's gateway port: HOST:PORT.", metavar="WORKER...")
    ],
    listen: Annotated[
        str, typer.Option(metavar="[HOST:]PORT", help="Where OpenAI clients connect.")
    ] = "8000",
    api_key: ApiKey = "",
    api_key_file: ApiKeyFile = None,
    *,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow plaintext beyond loopback.")] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning, error.")] = "warning",
    gateway_option: GatewayOption = None,
) -> None:
    """Serve the OpenAI API in front of several schedulers, each started with --gateway-port.

    Requests go where a beginning of their prompt is cached, and around schedulers that are down.

        paceline gateway 127.0.0.1:50071 127.0.0.1:50072 --listen 8000
    """
    refuse_client_options(context)
    launch = gateway_launch(
        listen,
        checked_api_key(context, api_key, api_key_file),
        insecure=insecure,
        log_level=log_level,
        options=flags(gateway_option),
    )
    workers = [check_address(worker) for worker in workers]
    require_free(launch.host, launch.port, "--listen")
    with never_blocking(stderr), tempfile.TemporaryDirectory(prefix="paceline-") as directory:
        child = launch.child(Path(directory), say, workers)
        try:
            asyncio.run(_keep(child, launch, workers))
        except (ChildFailed, OSError) as error:
            fail(str(error))


async def _keep(child: Child, launch: GatewayLaunch, workers: Sequence[str]) -> None:
    """Keep the gateway running until a signal. A second one ends it at once."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set() or not child.port:
            child.kill()
        else:
            stderr.print("[dim]letting running requests end; once more to stop at once[/]")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        await child.start(launch.port)
    except ChildFailed:
        if stop.is_set():
            return
        raise
    stderr.print(f"OpenAI API at {launch.url(child.port)}. Ctrl-C stops.", highlight=False, soft_wrap=True)
    keeping = asyncio.create_task(child.keep_running())
    stopping = asyncio.create_task(stop.wait())
    telling = asyncio.create_task(
        tell_readiness(lambda: is_ready(launch.host, child.port, tls=launch.tls), workers)
    )
    await asyncio.wait([keeping, stopping], return_when=asyncio.FIRST_COMPLETED)
    telling.cancel()
    if stop.is_set():
        await child.stop()
    await keeping


async def tell_readiness(
    ready: Callable[[], Awaitable[bool]], workers: Sequence[str], poll_s: float = _POLL_S
) -> None:
    """Say when the gateway takes requests and when it takes none, until cancelled: smg says it at info alone.

    At a start it has some polls' time to find its schedulers before anything is said.
    """
    known = False
    for polls in count():
        now = await ready()
        if now and not known:
            stderr.print("Ready: a scheduler serves.", highlight=False)
        elif not now and (known or polls == _PATIENT_POLLS):
            warn(
                f"no scheduler serves at {', '.join(workers)}: requests are refused until one does. Each is"
                " started with --gateway-port, and named here by that port"
            )
        known = now
        await asyncio.sleep(poll_s)
