"""`paceline steps`: what the scheduler did, a line a step, or as a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, cast

import typer
from google.protobuf.proto import serialize_length_prefixed

from paceline import errors
from paceline.channel import Security
from paceline.cli.common import (
    DEFAULT_ADDRESS,
    Address,
    OfModel,
    Place,
    console,
    fail,
    one_line_errors,
    security,
    stderr,
)
from paceline.cli.rows import counted
from paceline.cli.step_trace import trace
from paceline.client import Client
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.steps import Step, steps_of

_HEAD = "time          step   ms  (predicted)  prompt decode verify  tokens  pages  runs waits  because of"


def steps(
    context: typer.Context,
    place: Place = None,
    *,
    seconds: Annotated[float, typer.Option(help="Seconds until it stops; 0: with Ctrl-C.", min=0)] = 0,
    last: Annotated[
        float, typer.Option(help="Begin with steps of this many seconds ago.", min=0, max=3600)
    ] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the steps to this file instead.")
    ] = None,
    perfetto: Annotated[
        bool, typer.Option("--perfetto", help="Write it for ui.perfetto.dev and chrome://tracing.")
    ] = False,
    address: Address = DEFAULT_ADDRESS,
    model: OfModel = "",
) -> None:
    """Show what each step of the scheduler did, as it comes.

    A file has StepLog messages of the contract, each after its size as a varint. It is written when the
    recording ends, be it by Ctrl-C or by the scheduler's death. Others' requests are numbers, unless an
    administrator asks.
    """
    address = place or address
    if perfetto and output is None:
        fail("--perfetto needs -o FILE", 2)
    if output is not None and not seconds:
        fail("-o needs --seconds", 2)
    with one_line_errors(security(context), address):
        if output is not None:
            _record(watch(security(context), address, seconds, last, model), output, perfetto=perfetto)
            return
        stderr.print("[dim]Steps are shown as they come; Ctrl-C stops.[/]", highlight=False)
        typer.echo(_HEAD)
        any_came = False
        for log in watch(security(context), address, seconds, last, model):
            for step in steps_of(log):
                _show(step)
                any_came = True
        if not any_came:
            stderr.print("[dim]There was no step in this time.[/]", highlight=False)


def watch(
    security: Security, address: str, seconds: float, last: float, model: str = ""
) -> Iterator[pb.StepLog]:
    """The steps from `last` seconds ago on, until `seconds` from now; 0: without end.

    Raises `paceline.errors`.
    """
    with Client(address, security=security, failover_timeout_s=0, directory="off", model=model) as client:
        try:
            yield from client.step_logs(last_s=last, timeout_s=seconds or None)
        except errors.DeadlineExceeded:
            return


def _record(logs: Iterator[pb.StepLog], output: Path, *, perfetto: bool) -> None:
    """Write what comes to a file: at the end, whichever it is. Raises OSError, `paceline.errors`."""
    output.open("ab").close()  # what can't be written is not waited for
    found: list[pb.StepLog] = []
    try:
        for log in logs:
            found.append(log)
    finally:
        if found or sys.exception() is None:
            _write(found, output, perfetto=perfetto)


def _write(found: Sequence[pb.StepLog], output: Path, *, perfetto: bool) -> None:
    if perfetto:
        output.write_text(trace(step for log in found for step in steps_of(log)), encoding="utf-8")
    else:
        with output.open("wb") as file:
            for log in found:
                serialize_length_prefixed(log, cast(BytesIO, file))  # any file will do
    count = sum(len(log.tokens) for log in found)
    lost = sum(log.lost_steps for log in found)
    console.print(f"{counted(count, 'step')}, {lost} lost: {output}", markup=False, soft_wrap=True)


def _show(step: Step) -> None:
    if step.lost:
        typer.echo(f"{counted(step.lost, 'step')} lost: this reader was too slow")
    began = time.strftime("%H:%M:%S", time.localtime(step.started_us // 1_000_000))
    typer.echo(
        f"{began}.{step.started_us // 1000 % 1000:03} {step.number:5} {step.taken_us / 1000:6.1f}"
        f" {step.planned_us / 1000:10.1f} {step.prompt_rows:8} {step.decode_rows:6}"
        f" {step.verify_rows:6} {step.tokens:7} {step.free_pages:6} {step.running:5}"
        f" {step.waiting:5}  {step.reason}"
    )
