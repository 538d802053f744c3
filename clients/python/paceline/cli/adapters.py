"""`paceline adapters`: those that requests may name; load and unload them."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from paceline.cli.answer import write
from paceline.cli.common import Addresses, TimeoutS, client_of
from paceline.cli.rows import counted
from paceline.types import AdapterInfo

adapters = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Load, unload and list adapters (LoRA), while requests run.

    An executor reads adapters below its --adapter-dir (`paceline serve --adapter-dir DIRECTORY`), in PEFT's
    files. Requests name one as their model: `paceline generate --model NAME`. Where callers need tokens,
    these commands need an administrator's.""",
)
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object per adapter.")]
Name = Annotated[str, typer.Argument(help="The name that requests use.", show_default=False)]


@adapters.command("list")
def list_adapters(
    context: typer.Context, addresses: Addresses, *, as_json: AsJson = False, timeout_s: TimeoutS = None
) -> None:
    """List the adapters, and what uses them."""
    with client_of(context, addresses) as client:
        found = client.adapters(timeout_s=timeout_s)
    for one in found:
        write((json.dumps(as_object(one)) if as_json else as_text(one)) + "\n")
    if not found and not as_json:
        write("no adapter is loaded\n")


@adapters.command()
def load(
    context: typer.Context,
    addresses: Addresses,
    name: Name,
    path: Annotated[
        str, typer.Argument(help="Its directory, below --adapter-dir of the executors.", show_default="NAME")
    ] = "",
    *,
    as_json: AsJson = False,
    timeout_s: TimeoutS = None,
) -> None:
    """Load an adapter on all executors of all schedulers that are named; once more is no error.

    paceline adapters load poet poet-v2
    """
    with client_of(context, addresses) as client:
        one = client.load_adapter(name, path, timeout_s=timeout_s)
    write((json.dumps(as_object(one)) if as_json else as_text(one)) + "\n")


@adapters.command()
def unload(context: typer.Context, addresses: Addresses, name: Name, *, timeout_s: TimeoutS = None) -> None:
    """Refuse new requests that name an adapter, wait for its live ones, and unload it."""
    with client_of(context, addresses) as client:
        known = client.unload_adapter(name, timeout_s=timeout_s)
    write(f"{name} is unloaded\n" if known else f"{name} was not loaded\n")


def as_object(one: AdapterInfo) -> dict[str, Any]:
    """An adapter as JSON has it; the fingerprint in hexadecimal."""
    return {
        "name": one.name,
        "fingerprint": one.fingerprint.hex(),
        "rank": one.rank,
        "memory_bytes": one.memory_bytes,
        "requests": one.requests,
        "running": one.running,
        "waiting": one.waiting,
    }


def as_text(one: AdapterInfo) -> str:
    """An adapter as one line."""
    return (
        f"{one.name}  rank {one.rank}  {one.memory_bytes / 2**20:.1f} MiB  {one.fingerprint.hex()[:12]}"
        f"  {counted(one.requests, 'request')}, {one.running} running, {one.waiting} waiting"
    )
