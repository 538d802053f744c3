"""`paceline bench`: closed-loop load on a running scheduler."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from paceline import aio
from paceline.channel import Security
from paceline.cli import plot as plots
from paceline.cli import speculation_bench
from paceline.cli.common import (
    DEFAULT_ADDRESS,
    Address,
    TimeoutS,
    console,
    fail,
    require_writable,
    run,
    security,
    stderr,
)
from paceline.cli.load import Load, Summary, Trace, run_rounds, summarize
from paceline.cli.loading import loading_bar
from paceline.cli.pull import find_model
from paceline.cli.rows import Column, Rows, counted
from paceline.cli.serve import (
    QUIET,
    DraftBackend,
    DraftModel,
    DraftOption,
    say,
    stack_config,
)
from paceline.cli.served_model import draft_config, flags
from paceline.cli.stack import StackConfig, starting
from paceline.types import ModelInfo


def bench(
    context: typer.Context,
    concurrency: Annotated[
        str, typer.Option("--concurrency", "-c", help="Streams at once, as a list.")
    ] = "1,8,32",
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1)] = 64,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1)] = 64,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Requests of each stream, in turn.")] = 3,
    *,
    together: Annotated[
        bool, typer.Option("--together/--free", help="Start all streams of a round together.")
    ] = True,
    warmup: Annotated[bool, typer.Option(help="Run one unmeasured round before each level.")] = True,
    temperature: Annotated[float, typer.Option("--temperature", "-t", min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", min=0.0, max=1.0)] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of sampling.")] = 0,
    repeats: Annotated[
        int, typer.Option(min=1, help="A prompt repeats one passage this many times: easy to draft.")
    ] = 1,
    speculation: Annotated[
        bool, typer.Option("--speculation", help="Compare plain decoding with each drafter.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="With --speculation: write the plot here, as PNG and SVG.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--json", help="Write the results here ('-': stdout).")
    ] = None,
    timeout_s: TimeoutS = None,
    own: Annotated[
        str | None,
        typer.Option("--serve", metavar="BACKEND", help="Start services for this run: torch, oracle, ..."),
    ] = None,
    served_model: Annotated[
        str | None, typer.Option("--model", help="With --serve torch. Default: the default model.")
    ] = None,
    executor_option: Annotated[
        list[str] | None,
        typer.Option("--executor-option", "-E", metavar="NAME=VALUE", help="With --serve."),
    ] = None,
    draft_model: DraftModel = None,
    draft_backend: DraftBackend = None,
    draft_option: DraftOption = None,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Measure time to first token, inter-token latency and throughput.

    Prompts are random token ids, so that the prefix cache has no effect, and every request generates
    exactly --new-tokens tokens. "decode" is the throughput between the last stream's first token and the
    first stream's end (median of the rounds), while all streams decode. It needs --together.

        paceline bench --speculation -c 1,4,16 --repeats 4 --plot speculation
        paceline bench --speculation --serve oracle -E step-ms=20 --draft-backend oracle
            -D draft-agreement=0.8 -D step-ms=2
    """
    try:
        levels = [int(level) for level in concurrency.split(",")]
    except ValueError:
        levels = []
    if not levels or min(levels) < 1:
        fail(f"--concurrency: expected numbers like 1,8,32, got {concurrency!r}", 2)
    if plot is not None:
        if not speculation:
            fail("--plot needs --speculation", 2)
        plots.require()
        for file in plots.files(plot):
            require_writable(file, "--plot")
    # The rows are for people: with the JSON on stdout they go to stderr.
    screen = stderr if output == Path("-") else console
    if screen is console:
        require_writable(output, "--json")
    config = None
    draft = draft_config(draft_backend, draft_model, draft_option, QUIET)
    if own is not None:
        path = find_model(served_model) if served_model else None
        config = stack_config(own, path, flags(executor_option, "-E"), draft)
    elif served_model or executor_option or draft:
        fail("--model, --executor-option and --draft-... need --serve", 2)
    load = Load(
        prompt_tokens, new_tokens, temperature, top_p, seed, salt=secrets.token_hex(8), repeats=repeats
    )
    parameters = _BenchParameters(load, levels, rounds, together, warmup, timeout_s, screen)
    measure = _compare if speculation else _measure
    if config is not None:
        outcome = run(
            security(context), _with_own_services(config, parameters, measure), "the services of this run"
        )
    else:
        outcome = run(security(context), measure(address, security(context), parameters), address)
    text = json.dumps(outcome.report(parameters), indent=2)
    if output == Path("-"):
        typer.echo(text)
    elif output is not None:
        output.write_text(text + "\n")
    if plot is not None:
        files = plots.write(outcome.comparison, outcome.title(parameters), plot)
        stderr.print(f"[dim]plot: {', '.join(str(file) for file in files)}[/]", highlight=False)


@dataclass(frozen=True, slots=True)
class _BenchParameters:
    """The parameters of one run of the command."""

    load: Load
    levels: list[int]
    rounds: int
    together: bool
    warmup: bool
    timeout_s: float | None
    screen: Console  # for the rows, and on a terminal the progress below them


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The results in the forms in which they are written as JSON and plotted."""

    model: ModelInfo
    levels: list[dict[str, Any]]  # for JSON, one per concurrency
    comparison: speculation_bench.Results  # for the plot; empty without --speculation

    def report(self, parameters: _BenchParameters) -> dict[str, Any]:
        model = self.model
        return {
            "model": {"name": model.name, "dtype": model.dtype, "version": model.version},
            "load": dataclasses.asdict(parameters.load)
            | {"rounds": parameters.rounds, "together": parameters.together},
            "levels": self.levels,
        }

    def title(self, parameters: _BenchParameters) -> str:
        load = parameters.load
        prompts = f"prompts of {load.prompt_tokens} random tokens"
        if load.repeats > 1:
            prompts += f", a passage {load.repeats} times over"
        asked = f"{prompts}, {load.new_tokens} new, temperature {load.temperature:g}"
        return f"{self.model.name} ({self.model.dtype}): {asked}"


_Measure = Callable[[str, Security, _BenchParameters], Coroutine[object, object, _Outcome]]


async def _with_own_services(
    config: StackConfig, parameters: _BenchParameters, measure: _Measure
) -> _Outcome:
    """Measure services that are started for this run and stopped after it."""
    async with AsyncExitStack() as cleanup:
        with loading_bar() as loading:
            stack = await cleanup.enter_async_context(starting(config, say, loading))
        return await measure(stack.address, stack.client_security, parameters)


async def _measure(address: str, tls: Security, parameters: _BenchParameters) -> _Outcome:
    levels: list[dict[str, Any]] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    rows = Rows(parameters.screen, _CAPTION, _COLUMNS)
    async with aio.Client(address, security=tls, directory="off") as client:
        model = await _model(client, parameters.load)
        number = 0
        with _progress(parameters.screen, *columns) as bars:
            for level in parameters.levels:
                bar = bars.add_task(counted(level, "stream"), total=None)
                traces: list[list[Trace]] = []
                for measured in (False, True) if parameters.warmup else (True,):
                    traces = await run_rounds(
                        client,
                        model,
                        parameters.load,
                        concurrency=level,
                        rounds=parameters.rounds if measured else 1,
                        together=parameters.together,
                        timeout_s=parameters.timeout_s,
                        first_number=number,
                    )
                    number += (
                        level * parameters.rounds
                    )  # no prompt is sent twice: the prefix cache would have it
                bars.remove_task(bar)
                result = summarize(traces, together=parameters.together)
                levels.append({"concurrency": level} | dataclasses.asdict(result))
                rows.add(*_cells(level, result))
    return _Outcome(model, levels, {})


async def _compare(address: str, tls: Security, parameters: _BenchParameters) -> _Outcome:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    results: speculation_bench.Results = {}
    rows = Rows(parameters.screen, speculation_bench.CAPTION, speculation_bench.COLUMNS)
    async with aio.Client(address, security=tls, directory="off") as client:
        model = await _model(client, parameters.load)
        each = len(speculation_bench.modes(model)) * (parameters.rounds + 1) * parameters.load.new_tokens
        with _progress(parameters.screen, *columns) as bars:
            bar = bars.add_task("", total=sum(parameters.levels) * each)
            async for level, by_mode in speculation_bench.compare(
                client,
                model,
                parameters.load,
                parameters.levels,
                parameters.rounds,
                parameters.timeout_s,
                lambda what, tokens: bars.update(bar, description=what, advance=tokens),
            ):
                results[level] = by_mode
                for cells in speculation_bench.cells(level, by_mode):
                    rows.add(*cells)
    levels = [
        {"concurrency": level, "modes": {name: dataclasses.asdict(one) for name, one in by_mode.items()}}
        for level, by_mode in results.items()
    ]
    return _Outcome(model, levels, results)


def _progress(screen: Console, *columns: ProgressColumn) -> Progress:
    """Progress on the console that gets the rows, so that neither overwrites the other; none in a pipe."""
    return Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)


async def _model(client: aio.Client, load: Load) -> ModelInfo:
    """The scheduler's model. Exits with an error if the load exceeds its limit of tokens per request."""
    model = await client.model_info(timeout_s=10)
    if load.prompt_tokens + load.new_tokens > model.max_request_tokens:
        fail(f"{model.name} takes {model.max_request_tokens} tokens a request, prompt and new together")
    return model


_CAPTION = (
    "times in ms, p50 / p99. TTFT: until a stream's first token; ITL: between tokens; queue: until the\n"
    "first step. tok/s: of all streams over the whole time; decode: the same while every stream decodes.\n"
    "Random prompts make answers that loop, which drafts foresee: compare with --speculation."
)
_COLUMNS = (
    Column("streams", 7),
    Column("TTFT", 13),
    Column("ITL", 13),
    Column("tok/s", 7),
    Column("decode", 7),
    Column("queue", 13),
)


def _cells(level: int, result: Summary) -> tuple[str, ...]:
    """The figures of one concurrency, as _COLUMNS has them."""
    rate = result.decode_tokens_per_s
    return (
        f"{level}",
        f"{result.ttft_ms.p50:.0f} / {result.ttft_ms.p99:.0f}",
        f"{result.itl_ms.p50:.1f} / {result.itl_ms.p99:.1f}",
        f"{result.tokens_per_s:.0f}",
        "-" if rate is None else f"{rate:.0f}",
        f"{result.queue_ms.p50:.0f} / {result.queue_ms.p99:.0f}",
    )
