"""`paceline demo`: starts both services, answers eight prompts at once, and shows the figures."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from paceline import aio
from paceline.channel import PLAINTEXT
from paceline.chat import Message
from paceline.cli.common import console, run
from paceline.cli.load import Trace, summarize
from paceline.cli.loading import loading_bar
from paceline.cli.rows import counted
from paceline.cli.serve import say, stack_config
from paceline.cli.stack import StackConfig, starting
from paceline.executor.v1 import executor_pb2
from paceline.types import Delta, Status

_PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Describe a sunrise in one sentence.",
    "List three kinds of fruit.",
    "What is the difference between a process and a thread?",
    "Give me a short recipe for pancakes.",
    "Tell me a story about a robot who learns to paint.",
    "What is gravity?",
)
_REFRESH_S = 0.1
_STATUS_TIMEOUT_S = 5.0
_PANEL_LINES = 5
_COLUMNS = (
    "milliseconds, as the client saw them. TTFT: until the first token; ITL: between two tokens,"
    " of half (p50) and of all but one in a hundred (p99)"
)


@dataclass(slots=True)
class _Stream:
    """One prompt and its answer so far."""

    prompt: str
    trace: Trace = field(default_factory=lambda: Trace(started=time.perf_counter()))
    text: str = ""

    @property
    def done(self) -> bool:
        return self.trace.finished is not None


def demo(
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Of each answer.")] = 96,
    temperature: Annotated[float, typer.Option("--temperature", "-t", min=0.0)] = 0.0,
) -> None:
    """Show everything at once: start both services and answer eight prompts together.

    Downloads the default model on first use (98 MB).
    """
    run(PLAINTEXT, _demo(stack_config("torch"), max_tokens, temperature), "the services of this demo")


async def _demo(config: StackConfig, max_tokens: int, temperature: float) -> None:
    """Start a stack, show the answers to the demo's prompts as they come, and print what was measured.

    The model's file is there already: its download is not part of the times.
    """
    async with AsyncExitStack() as cleanup:
        began = time.perf_counter()
        with loading_bar() as loading:
            stack = await cleanup.enter_async_context(starting(config, say, loading))
        client = await cleanup.enter_async_context(aio.Client(stack.address, security=stack.client_security))
        executor = await cleanup.enter_async_context(
            aio.ExecutorClient(stack.executor_address, security=stack.executor_security)
        )
        model = await client.model_info(timeout_s=_STATUS_TIMEOUT_S)
        console.print(
            f"[bold]{model.name}[/] ({model.dtype}), executor pid {stack.executor.pid}, scheduler pid"
            f" {stack.scheduler.pid}, ready after {time.perf_counter() - began:.1f} s",
            highlight=False,
            soft_wrap=True,
        )
        before = await executor.get_status(timeout_s=_STATUS_TIMEOUT_S)
        streams = [_Stream(prompt) for prompt in _PROMPTS]
        async with _screen(client, streams), asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(_answer(client, stream, max_tokens, temperature))
        after = await executor.get_status(timeout_s=_STATUS_TIMEOUT_S)
        console.print(_closing_table(streams, before, after))
        console.print(_next_steps(), highlight=False, markup=False, soft_wrap=True)


def _next_steps() -> str:
    """What to type now. The command may lie in an environment that is not active."""
    script = os.path.abspath(sys.argv[0])
    program = "paceline" if shutil.which("paceline") else min(os.path.relpath(script), script, key=len)
    return (
        f"Next, in one terminal:  {program} serve\n"
        f"and in another one:     {program} chat\n"
        f'                        {program} generate --chat "Why is the sky blue?"'
    )


async def _answer(client: aio.Client, stream: _Stream, max_tokens: int, temperature: float) -> None:
    stream.trace.started = time.perf_counter()
    async with client.generate(
        messages=[Message("user", stream.prompt)], max_tokens=max_tokens, temperature=temperature, seed=1
    ) as generation:
        async for event in generation:
            stream.trace.record(event, time.perf_counter())
            if isinstance(event, Delta):
                stream.text += event.text


@asynccontextmanager
async def _screen(client: aio.Client, streams: list[_Stream]) -> AsyncIterator[None]:
    """A context manager: shows the streams while the block runs, live on a terminal, else as lines."""
    show = _live(client, streams) if console.is_terminal else _lines(client, streams)
    showing = asyncio.create_task(show)
    try:
        yield
    finally:
        if not all(stream.done for stream in streams):
            showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)


async def _live(client: aio.Client, streams: list[_Stream]) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            finished = all(stream.done for stream in streams)
            status = await client.status(timeout_s=_STATUS_TIMEOUT_S)
            live.update(_panels(streams, _status_line(status, streams)), refresh=True)
            if finished:
                return
            await asyncio.sleep(_REFRESH_S)


async def _lines(client: aio.Client, streams: list[_Stream]) -> None:
    shown: set[int] = set()
    next_status = time.perf_counter() + 1.0
    while len(shown) < len(streams):
        if time.perf_counter() >= next_status:
            status = await client.status(timeout_s=_STATUS_TIMEOUT_S)
            console.print(_status_line(status, streams), soft_wrap=True)
            next_status = time.perf_counter() + 1.0
        for number, stream in enumerate(streams):
            if stream.done and number not in shown:
                shown.add(number)
                console.print(Text(f"[{number + 1}] {stream.prompt}\n    {' '.join(stream.text.split())}"))
        await asyncio.sleep(_REFRESH_S)


def _panels(streams: Iterable[_Stream], status_line: Text) -> RenderableType:
    columns = 2 if console.width >= 80 else 1
    room = max(2, (shutil.get_terminal_size().lines - 2) // (8 // columns) - 2)
    width = console.width // columns
    return Group(
        Columns([_panel(stream, width, min(room, _PANEL_LINES)) for stream in streams], padding=0),
        status_line,
    )


def _panel(stream: _Stream, width: int, lines: int) -> Panel:
    """A panel with the last lines of an answer."""
    wrapped = Text(stream.text).wrap(console, width - 4)
    body = Text("\n").join(wrapped[-lines:]) if wrapped else Text("")
    return Panel(
        body,
        title=Text(stream.prompt, style="bold", overflow="ellipsis", no_wrap=True),
        title_align="left",
        subtitle=counted(stream.trace.tokens, "token"),
        subtitle_align="right",
        border_style="green" if stream.done else "cyan" if stream.trace.arrivals else "dim",
        width=width,
        height=lines + 2,
    )


def _status_line(status: Status, streams: Iterable[_Stream]) -> Text:
    recent = time.perf_counter() - 1.0
    rate = sum(count for stream in streams for now, count in stream.trace.arrivals if now > recent)
    used = status.total_pages - status.available_pages
    return Text(
        f"running {status.running} · waiting {status.waiting} · {rate} tokens/s ·"
        f" {status.batch_rows:.1f} rows a step · {status.step_ms:.0f} ms a step · {used} KV pages in use",
        style="dim",
    )


def _closing_table(
    streams: list[_Stream], before: executor_pb2.GetStatusResponse, after: executor_pb2.GetStatusResponse
) -> Table:
    table = Table(title="What it took", caption=_COLUMNS)
    for name in ("prompt", "tokens", "TTFT", "ITL p50", "ITL p99", "ended by"):
        table.add_column(name, justify="left" if name in ("prompt", "ended by") else "right")
    for number, stream in enumerate(streams, 1):
        figures, end = summarize([[stream.trace]]), stream.trace.finished
        table.add_row(
            Text(f"[{number}] {stream.prompt}", overflow="ellipsis", no_wrap=True),
            f"{figures.tokens}",
            f"{figures.ttft_ms.p50:.0f}",
            f"{figures.itl_ms.p50:.1f}",
            f"{figures.itl_ms.p99:.1f}",
            end.reason.value if end else "-",
        )
    traces = [stream.trace for stream in streams]
    figures = summarize([traces])
    steps = after.steps - before.steps
    table.add_section()
    table.add_row(
        "all together",
        f"{figures.tokens}",
        f"{figures.ttft_ms.p50:.0f}",
        f"{figures.itl_ms.p50:.1f}",
        f"{figures.itl_ms.p99:.1f}",
        f"{figures.tokens_per_s:.0f} tokens/s",
    )
    table.add_row(
        "batches",
        counted(steps, "step"),
        "",
        "",
        "",
        f"{(after.rows - before.rows) / max(steps, 1):.1f} rows a step",
    )
    return table
