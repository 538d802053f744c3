"""`paceline bench`: closed-loop load on a running scheduler."""

from __future__ import annotations

import dataclasses
import json
import secrets
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline import aio
from paceline.channel import Security
from paceline.cli.common import DEFAULT_ADDRESS, Address, TimeoutS, console, fail, run, security, stderr
from paceline.cli.load import Load, Summary, run_rounds, summarize
from paceline.cli.serve import loading_bar, say, stack_config
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
    together: Annotated[
        bool, typer.Option("--together/--free", help="Start all streams of a round together.")
    ] = True,
    warmup: Annotated[bool, typer.Option(help="Run one unmeasured round before each level.")] = True,
    temperature: Annotated[float, typer.Option("--temperature", "-t", min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", min=0.0, max=1.0)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the prompts and of the sampling.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--json", help="Write the results here ('-': stdout).")
    ] = None,
    timeout_s: TimeoutS = None,
    own: Annotated[
        str | None,
        typer.Option("--serve", metavar="BACKEND", help="Start services for this run: torch, oracle, ..."),
    ] = None,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Measure time to first token, inter-token latency and throughput.

    Prompts are random token ids, so that neither text nor the prefix cache matters, and every
    request generates exactly --new-tokens tokens. "decode" is the throughput between the last
    stream's first token and the first stream's end (median of the rounds): the engine's own speed,
    free of prefill and of emptying batches. It needs --together.
    """
    try:
        levels = [int(level) for level in concurrency.split(",")]
    except ValueError:
        levels = []
    if not levels or min(levels) < 1:
        fail(f"--concurrency: expected numbers like 1,8,32, got {concurrency!r}", 2)
    load = Load(prompt_tokens, new_tokens, temperature, top_p, seed, salt=secrets.token_hex(8))
    plan = _Plan(load, levels, rounds, together, warmup, timeout_s)
    if own is not None:
        model, results = run(_with_own_services(stack_config(own), plan), "the services of this run")
    else:
        model, results = run(_bench(address, security(context), plan), address)
    report = {
        "model": {"name": model.name, "dtype": model.dtype, "version": model.version},
        "load": dataclasses.asdict(load) | {"rounds": rounds, "together": together},
        "levels": [{"concurrency": level} | dataclasses.asdict(result) for level, result in results.items()],
    }
    text = json.dumps(report, indent=2)
    if output == Path("-"):
        typer.echo(text)
        return
    console.print(table(results))
    if output is not None:
        output.write_text(text + "\n")


@dataclass(frozen=True, slots=True)
class _Plan:
    load: Load
    levels: list[int]
    rounds: int
    together: bool
    warmup: bool
    timeout_s: float | None


_Results = tuple[ModelInfo, dict[int, Summary]]


async def _with_own_services(config: StackConfig, plan: _Plan) -> _Results:
    """Bench a stack that lives as long as the run."""
    async with AsyncExitStack() as cleanup:
        with loading_bar() as loading:
            stack = await cleanup.enter_async_context(starting(config, say, loading))
        return await _bench(stack.address, config.scheduler_security, plan)


async def _bench(address: str, tls: Security, plan: _Plan) -> _Results:
    results: dict[int, Summary] = {}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    async with aio.Client(address, security=tls) as client:
        model = await client.model_info(timeout_s=10)
        if plan.load.prompt_tokens + plan.load.new_tokens > model.max_request_tokens:
            fail(f"{model.name} takes {model.max_request_tokens} tokens a request, prompt and new together")
        number = 0
        bars = Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)
        with bars:
            for level in plan.levels:
                bar = bars.add_task(f"{level} streams", total=None)
                for measured in (False, True) if plan.warmup else (True,):
                    traces = await run_rounds(
                        client,
                        model,
                        plan.load,
                        concurrency=level,
                        rounds=plan.rounds if measured else 1,
                        together=plan.together,
                        timeout_s=plan.timeout_s,
                        first_number=number,
                    )
                    number += level * plan.rounds  # no prompt twice: the prefix cache would know it
                    results[level] = summarize(traces, together=plan.together)
                bars.remove_task(bar)
    return model, results


def table(results: dict[int, Summary]) -> Table:
    """The figures, a line per level."""
    table = Table(caption="times in ms, p50 / p99; decode: tok/s while every stream decodes")
    for column in ("streams", "TTFT", "ITL", "tok/s", "decode", "queue"):
        table.add_column(column, justify="right", no_wrap=True)
    for level, result in results.items():
        rate = result.decode_tokens_per_s
        table.add_row(
            f"{level}",
            f"{result.ttft_ms.p50:.0f} / {result.ttft_ms.p99:.0f}",
            f"{result.itl_ms.p50:.1f} / {result.itl_ms.p99:.1f}",
            f"{result.tokens_per_s:.0f}",
            "-" if rate is None else f"{rate:.0f}",
            f"{result.queue_ms.p50:.0f} / {result.queue_ms.p99:.0f}",
        )
    return table
