"""`paceline steps`: what the scheduler did, a line a step, or as a file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Annotated, cast

import typer
from google.protobuf.proto import serialize_length_prefixed

from paceline import errors
from paceline.calls import Replies, endpoint_at
from paceline.channel import Security
from paceline.cli.common import DEFAULT_ADDRESS, Address, console, fail, one_line_errors, security
from paceline.cli.step_trace import starts_us, trace
from paceline.responses import lower_name
from paceline.scheduler.v1 import scheduler_pb2 as pb

_HEAD = "time          step   ms  (predicted)  prompt decode verify  tokens  pages  runs waits  because of"


def steps(
    context: typer.Context,
    *,
    seconds: Annotated[float, typer.Option(help="Seconds until it stops; 0: with Ctrl-C.", min=0)] = 0,
    last: Annotated[float, typer.Option(help="Begin with steps of this many seconds ago.", min=0)] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the steps to this file instead.")
    ] = None,
    perfetto: Annotated[
        bool, typer.Option("--perfetto", help="Write it for ui.perfetto.dev and chrome://tracing.")
    ] = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Show what each step of the scheduler did, as it comes.

    A file has StepLog messages of the contract, each after its size as a varint. Others' requests are
    numbers, unless an administrator asks.
    """
    if perfetto and output is None:
        fail("--perfetto needs -o FILE", 2)
    if output is not None and not seconds:
        fail("-o needs --seconds", 2)
    found: list[pb.StepLog] = []
    if output is None:
        typer.echo(_HEAD)
    with one_line_errors(address):
        for log in _watch(security(context), address, seconds, last):
            found.append(log) if output is not None else _show(log)
        if output is None:
            return
        if perfetto:
            output.write_text(trace(found), encoding="utf-8")
        else:
            with output.open("wb") as file:
                for log in found:
                    serialize_length_prefixed(log, cast(BytesIO, file))  # any file will do
    count = sum(len(log.tokens) for log in found)
    lost = sum(log.lost_steps for log in found)
    console.print(f"{count} steps, {lost} lost: {output}", markup=False, soft_wrap=True)


def _watch(security: Security, address: str, seconds: float, last: float) -> Iterator[pb.StepLog]:
    """The steps from `last` seconds ago on, until `seconds` from now. Raises `paceline.errors`."""
    endpoint = endpoint_at(address, security, security.credentials())
    try:
        call = endpoint.scheduler.WatchSteps(
            pb.WatchStepsRequest(last_us=max(1, round(1e6 * last))),
            timeout=seconds or None,
            metadata=security.metadata,
        )
        replies = Replies(call)
        while (reply := replies.read()) is not None:
            yield reply.log
    except errors.DeadlineExceeded:
        return
    finally:
        endpoint.channel.close()


def _show(log: pb.StepLog) -> None:
    if log.lost_steps:
        typer.echo(f"{log.lost_steps} steps lost: this reader was too slow")
    for at, start_us in enumerate(starts_us(log)):
        began = time.strftime("%H:%M:%S", time.localtime(start_us // 1_000_000))
        reason = lower_name(pb.WaitReason, "WAIT_REASON_", log.reasons[at]) if log.reasons[at] else ""
        typer.echo(
            f"{began}.{start_us // 1000 % 1000:03} {log.first_step + at:5} {log.taken_us[at] / 1000:6.1f}"
            f" {log.planned_us[at] / 1000:10.1f} {log.prompt_rows[at]:8} {log.decode_rows[at]:6}"
            f" {log.verify_rows[at]:6} {log.tokens[at]:7} {log.free_pages[at]:6} {log.running[at]:5}"
            f" {log.waiting[at]:5}  {reason}"
        )
