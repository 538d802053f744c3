"""`paceline serve`: an executor and a scheduler, kept running until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from paceline import errors
from paceline.cli.common import fail, security, stderr
from paceline.cli.model import fetch_default
from paceline.cli.stack import Loading, Stack, StackConfig, starting
from paceline.cli.supervisor import ChildFailed

_COLORS = {"executor": "magenta", "scheduler": "cyan"}

Backend = Annotated[
    str,
    typer.Option(help="torch (a model), or without one: oracle (a hash), paged-attention (the reference)."),
]


def serve(
    context: typer.Context,
    backend: Backend = "torch",
    model: Annotated[
        Path | None,
        typer.Option(
            help="A GGUF file or a Hugging Face directory. Default: the default model.", show_default=False
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Where the scheduler listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="And on which port; 0: any free one.")] = 50051,
    port_file: Annotated[
        Path | None, typer.Option(help="Write the scheduler's port here once it serves.")
    ] = None,
    executor_port: Annotated[int, typer.Option(min=0, max=65535, help="On loopback; 0: any free one.")] = 0,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow plaintext beyond loopback.")] = False,
    log_level: Annotated[
        str, typer.Option(help="Of both services: debug, info, warning, error.")
    ] = "warning",
    executor_option: Annotated[
        list[str] | None,
        typer.Option("--executor-option", "-E", metavar="NAME=VALUE", help="See `paceline executor --help`."),
    ] = None,
    scheduler_option: Annotated[
        list[str] | None,
        typer.Option(
            "--scheduler-option", "-S", metavar="NAME=VALUE", help="See `paceline scheduler --help`."
        ),
    ] = None,
) -> None:
    """Serve a model: start an executor and a scheduler, and keep them running.

    The first start downloads the default model (98 MB). A process that dies is started again on its
    port, and streams go on. Ctrl-C lets running requests end; a second one stops at once.

        paceline serve
        paceline serve --model ~/models/Qwen3-0.6B -S max-running=64 -E kv-memory=2GiB
    """
    logs = ("--log-level", log_level, "--log-format", "console")
    plain = ("--insecure",) if insecure else ()
    config = StackConfig(
        backend=backend,
        model=(model or fetch_default()) if backend == "torch" else model,
        host=host,
        port=port,
        executor_port=executor_port,
        executor_options=(*logs, *flags(executor_option)),
        scheduler_options=(*logs, *plain, *flags(scheduler_option)),
        scheduler_security=security(context),
    )
    try:
        asyncio.run(_serve(config, port_file))
    except asyncio.CancelledError:
        raise typer.Exit(130) from None
    except (ChildFailed, errors.PacelineError, OSError) as error:
        fail(str(error))


def stack_config(backend: str) -> StackConfig:
    """A stack on free ports for one command's own use, with the default model if it needs one."""
    quiet = ("--log-level", "error", "--log-format", "console")
    model = fetch_default() if backend == "torch" else None
    return StackConfig(backend=backend, model=model, executor_options=quiet, scheduler_options=quiet)


def flags(given: list[str] | None) -> list[str]:
    """NAME=VALUE pairs as a service's command line."""
    pairs = given or []
    for pair in pairs:
        if pair.find("=") < 1:
            fail(f"expected NAME=VALUE, got {pair!r}", 2)
    return [
        f"--{name.lstrip('-').replace('_', '-')}={value}"
        for name, _, value in (p.partition("=") for p in pairs)
    ]


def say(name: str, line: str) -> None:
    """A child's line, under its name."""
    stderr.print(
        f"[{_COLORS.get(name, 'white')}]{name:>9}[/] {escape(line)}", highlight=False, soft_wrap=True
    )


@contextmanager
def loading_bar() -> Iterator[Loading]:
    """A progress bar for the executor's loading, if stderr is a terminal."""
    if not stderr.is_terminal:
        yield lambda what, fraction: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True) as bars:
        bar = bars.add_task("starting", total=1.0)
        yield lambda what, fraction: bars.update(bar, description=what, completed=fraction)


async def _serve(config: StackConfig, port_file: Path | None) -> None:
    loop, stop, starter = asyncio.get_running_loop(), asyncio.Event(), asyncio.current_task()
    assert starter is not None
    stack: Stack | None = None

    def on_signal() -> None:
        if stack is None:
            starter.cancel()  # nothing serves yet, so nothing has to end first
        elif stop.is_set():
            stack.kill()
        else:
            stderr.print("[dim]letting running requests end; once more to stop at once[/]")
            stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    async with AsyncExitStack() as cleanup:
        with loading_bar() as loading:
            stack = await cleanup.enter_async_context(starting(config, say, loading))
        supervisor = asyncio.create_task(stack.supervise())
        cleanup.callback(supervisor.cancel)
        _announce(stack, port_file)
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([stopped, supervisor], return_when=asyncio.FIRST_COMPLETED)


def _announce(stack: Stack, port_file: Path | None) -> None:
    config = stack.config
    if port_file is not None:
        port_file.write_text(f"{stack.scheduler.port}\n")
    stderr.print(
        f"Serving [bold]{config.model.stem if config.model else config.backend}[/] at"
        f" [bold]{stack.address}[/] (executor at {stack.executor_address}). Ctrl-C stops.\n"
        f'[dim]Try: paceline generate --address {stack.address} "Once upon a time"[/]',
        highlight=False,
        soft_wrap=True,
    )
