"""`paceline serve`: runs an executor, optionally a draft executor, and a scheduler, until Ctrl-C."""

from __future__ import annotations

import asyncio
import enum
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from paceline import errors
from paceline.cli.adapter_options import AdapterDirectory, Adapters, require_adapters
from paceline.cli.announcement import announce, announce_models, tell_what_to_try
from paceline.cli.client_options import client_token, refuse_client_options
from paceline.cli.common import fail, require_writable, stderr
from paceline.cli.free_port import require_free
from paceline.cli.gateway_launch import (
    GatewayOption,
    GoneApiKey,
    GoneApiKeyFile,
    Processes,
    gateway_launch,
    require_tokens,
)
from paceline.cli.json_lines import JsonLines, json_lines
from paceline.cli.loading import loading_bar
from paceline.cli.log_writer import never_blocking
from paceline.cli.pull import check_model
from paceline.cli.served_model import default_sampling, draft_config, flags, served_model, served_name
from paceline.cli.services import require_services
from paceline.cli.several_models.config import (
    ForAllModels,
    are_several,
    bytes_of,
    models_config,
)
from paceline.cli.several_models.plan import ModelsConfig
from paceline.cli.several_models.stacks import ModelStacks, starting_models
from paceline.cli.stack import ExecutorLaunch, Stack, StackConfig, starting
from paceline.cli.stack_secrets import draw_token
from paceline.cli.supervisor import ChildFailed


class LogFormat(enum.Enum):
    """How `serve` writes what it and its services say."""

    CONSOLE = "console"
    JSON = "json"


_COLORS = {"executor": "magenta", "draft": "yellow", "scheduler": "cyan", "gateway": "blue"}  # else white

Backend = Annotated[
    str,
    typer.Option(
        help="torch (a model), or without one: oracle (a hash), script (what -E script=FILE tells),"
        " paged-attention (the reference)."
    ),
]

DraftModel = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help="A smaller model of the same vocabulary, to draft with.", show_default=False
    ),
]
DraftBackend = Annotated[
    str | None,
    typer.Option(
        help="What runs it. Default: torch with --draft-model, else nothing drafts.", show_default=False
    ),
]
DraftOption = Annotated[
    list[str] | None,
    typer.Option("--draft-option", "-D", metavar="NAME=VALUE", help="As -E, for the executor that drafts."),
]


def serve(
    context: typer.Context,
    served: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="A GGUF file, a Hugging Face directory, or a name from `paceline list`. Default: the default"
            " model. Several, or a YAML file of models: all at one address.",
            show_default=False,
        ),
    ] = None,
    backend: Backend = "torch",
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The same as an option.", show_default=False),
    ] = None,
    adapter_dir: AdapterDirectory = None,
    adapter: Adapters = None,
    draft_model: DraftModel = None,
    draft_backend: DraftBackend = None,
    host: Annotated[str, typer.Option(help="Where the scheduler listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="And on which port; 0: any free one.")] = 50051,
    port_file: Annotated[
        Path | None, typer.Option(help="Write the scheduler's port here once it serves.")
    ] = None,
    executor_port: Annotated[int, typer.Option(min=0, max=65535, help="On loopback; 0: any free one.")] = 0,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="Clients must send this file's token. PACELINE_TOKEN sets one too.", show_default=False
        ),
    ] = None,
    executor_token_file: Annotated[
        Path | None,
        typer.Option(
            help="Who sends this file's token may use the executor directly: a scheduler of your own,"
            " the conformance kit. Without it, only this command's own scheduler may.",
            show_default=False,
        ),
    ] = None,
    openai: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve the OpenAI API here too; 0: any free port.",
            show_default=False,
        ),
    ] = None,
    gateway_processes: Processes = 1,
    served_model_name: Annotated[
        str, typer.Option(help="The model's name for OpenAI clients. Default: its own.", show_default=False)
    ] = "",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Of several models: what all processes together may take, as in 12GB. All models but the"
            " first are then loaded when they are asked for, and put away for others.",
            show_default=False,
        ),
    ] = None,
    *,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow plaintext beyond loopback.")] = False,
    log_level: Annotated[
        str, typer.Option(help="Of both services: debug, info, warning, error.")
    ] = "warning",
    log_format: Annotated[
        LogFormat, typer.Option(help="json: each line of this command and of both services is an object.")
    ] = LogFormat.CONSOLE,
    otel: Annotated[
        bool, typer.Option("--otel", help="All processes send spans by OTLP, as OTEL_* say.")
    ] = False,
    executor_option: Annotated[
        list[str] | None,
        typer.Option("--executor-option", "-E", metavar="NAME=VALUE", help="See `paceline executor --help`."),
    ] = None,
    draft_option: DraftOption = None,
    scheduler_option: Annotated[
        list[str] | None,
        typer.Option(
            "--scheduler-option", "-S", metavar="NAME=VALUE", help="See `paceline scheduler --help`."
        ),
    ] = None,
    gateway_option: GatewayOption = None,
    api_key: GoneApiKey = "",
    api_key_file: GoneApiKeyFile = "",
) -> None:
    """Serve a model: start an executor and a scheduler, and keep them running.

    With --draft-model, a second executor drafts tokens, which the first verifies several at a time. This is
    faster if many drafts are accepted, and never changes the tokens.

    With --adapter-dir, requests may name adapters as their model: those of --adapter, and those that an
    administrator loads later (`paceline adapters load NAME`).

    The first start downloads the default model (98 MB). A process that dies or freezes is restarted on its
    port, and streams continue. Restarts are delayed by up to 10 s. After ten starts in a row that never
    served, or an exit status that tells wrong settings, the command prints the process's last line and exits
    with status 1. Ctrl-C (and SIGTERM, SIGHUP) lets running requests end; a second one stops at once.

    Only the scheduler may call the executors, unless --executor-token-file is given. Clients need no token,
    unless --token-file, PACELINE_TOKEN or `-S tokens-file=FILE` is given.

        paceline serve
        paceline serve ~/models/Qwen3-0.6B -S max-running=64 -E kv-memory=2GiB
        paceline serve ~/models/Qwen3-8B --draft-model ~/models/Qwen3-0.6B
        paceline serve ~/models/Qwen3-8B --adapter-dir ~/adapters --adapter poet
    """
    refuse_client_options(context)
    require_services(backend)
    if log_format is LogFormat.JSON:
        context.with_resource(json_lines(stderr))
    if served and model is not None:
        fail(f"{served[0]} and --model {model}: give one of them", 2)
    given = served or ([model] if model else [])
    chosen = given[0] if given else None
    logs = ("--log-level", log_level, "--log-format", log_format.value, *(("--otel",) if otel else ()))
    plain = ("--insecure",) if insecure else ()
    token = client_token(context, token_file)
    gateway = None
    if openai is not None:
        gateway = gateway_launch(
            openai,
            insecure=insecure,
            logs=logs,
            processes=gateway_processes,
            options=flags(gateway_option, "-G"),
            model_name=served_model_name,
            api_key=api_key or api_key_file,
        )
        require_tokens(token, flags(scheduler_option, "-S"))
    elif served_model_name or gateway_option or api_key or api_key_file or gateway_processes > 1:
        fail("--served-model-name, --gateway-option and --gateway-processes need --openai", 2)
    executor_token = ("--auth-token-file", str(executor_token_file)) if executor_token_file else ()
    require_adapters(adapter_dir, adapter or [])
    directory = ("--adapter-dir", str(adapter_dir)) if adapter_dir else ()
    adapters = tuple(f"--adapter={one}" for one in adapter or ())
    config: StackConfig | ModelsConfig
    if are_several(given):
        alone = (draft_model, draft_backend, draft_option, adapter_dir, adapter, executor_port or None)
        if any(option is not None for option in (*alone, executor_token_file, served_model_name or None)):
            fail("of several models, drafts, adapters and executors are set in the YAML file of models", 2)
        config = models_config(
            given,
            ForAllModels(
                backend,
                host,
                port,
                token,
                logs,
                plain,
                flags(executor_option, "-E"),
                flags(scheduler_option, "-S"),
                bytes_of(memory, "--memory"),
            ),
            gateway,
        )
        require_writable(port_file, "--port-file")
        require_free(host, port, "--port")
        _run(config, port_file)
        return
    if memory is not None:
        fail("--memory is for several models; of one, -E kv-memory=SIZE bounds the pages", 2)
    if backend == "torch":  # what fails at once comes before a model is fetched
        check_model(chosen)
    if draft_backend in (None, "torch"):
        check_model(draft_model)
    require_writable(port_file, "--port-file")
    require_free(host, port, "--port")
    require_free("127.0.0.1", executor_port, "--executor-port")
    if port and port == executor_port:
        fail(f"--port and --executor-port are both {port}: each process has its own", 2)
    config = StackConfig(
        backend=backend,
        model=served_model(backend, chosen),
        name=served_name(backend, chosen),
        draft=draft_config(draft_backend, draft_model, draft_option, logs),
        host=host,
        port=port,
        executor_port=executor_port,
        executor_options=(
            *logs,
            *executor_token,
            *directory,
            *default_sampling(backend, chosen),
            *flags(executor_option, "-E"),
        ),
        scheduler_options=(*logs, *plain, *adapters, *flags(scheduler_option, "-S")),
        client_token=token,
        gateway=gateway,
    )
    _run(config, port_file)


def _run(config: StackConfig | ModelsConfig, port_file: Path | None) -> None:
    """Serve until a signal."""
    if config.gateway is not None:
        require_free(config.gateway.host, config.gateway.port, "--openai")
    with never_blocking(stderr):
        try:
            asyncio.run(_serve(config, port_file))
        except asyncio.CancelledError:
            raise typer.Exit(130) from None
        except ChildFailed as error:
            fail(error.message)  # `say` has printed the last line
        except (errors.PacelineError, OSError) as error:
            fail(str(error))


QUIET = ("--log-level", "error", "--log-format", "console")


def stack_config(
    backend: str,
    model: Path | None = None,
    executor_options: Sequence[str] = (),
    draft: ExecutorLaunch | None = None,
) -> StackConfig:
    """A stack on free ports for one command alone, with a token of its own; by default the default model."""
    require_services(backend)
    return StackConfig(
        backend=backend,
        model=(model or served_model(backend, None)) if backend == "torch" else model,
        name=served_name(backend, str(model) if model else None),
        draft=draft,
        executor_options=(*QUIET, *default_sampling(backend, model), *executor_options),
        scheduler_options=QUIET,
        client_token=draw_token(),
    )


def say(name: str, line: str) -> None:
    """Print a line of a child process, with the child's name."""
    if isinstance(stderr.file, JsonLines):
        stderr.file.pass_on(name, line)
        return
    stderr.print(
        f"[{_COLORS.get(name, 'white')}]{name:>9}[/] {escape(line.removeprefix(f'paceline {name}: '))}",
        highlight=False,
        soft_wrap=True,
    )


async def _serve(config: StackConfig | ModelsConfig, port_file: Path | None) -> None:
    loop, stop, starter = asyncio.get_running_loop(), asyncio.Event(), asyncio.current_task()
    assert starter is not None
    stack: Stack | ModelStacks | None = None

    def on_signal(number: signal.Signals) -> None:
        if stack is None:
            starter.cancel()  # not serving yet: no requests to wait for
        elif stop.is_set():
            if number is not signal.SIGHUP:  # shell and kernel may both send it for one hang-up
                stack.kill()
        else:
            stderr.print("[dim]letting running requests end; once more to stop at once[/]")
            stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            loop.add_signal_handler(number, on_signal, number)
    async with AsyncExitStack() as cleanup:
        with loading_bar() as loading:
            opening = (
                starting(config, say, loading)
                if isinstance(config, StackConfig)
                else starting_models(config, say, loading)
            )
            opened: Stack | ModelStacks = await cleanup.enter_async_context(opening)
            stack = opened
        supervisor = asyncio.create_task(opened.supervise())
        cleanup.callback(supervisor.cancel)
        if isinstance(opened, Stack):
            announce(opened, port_file)
            await tell_what_to_try(opened)
        else:
            announce_models(opened, port_file)
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([stopped, supervisor], return_when=asyncio.FIRST_COMPLETED)
        if supervisor.done():
            await supervisor
