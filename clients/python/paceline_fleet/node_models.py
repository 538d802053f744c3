"""The model of a stack on its node: found there, or fetched from a hub, once for all stacks of the node."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable
from pathlib import Path

import typer
from paceline.cli.child_run import send_signal
from paceline.cli.models.hub import hub_name
from paceline.cli.models.local import find_local
from paceline.cli.served_model import served_model
from paceline.cli.supervisor import ChildFailed

_LOOK_S = 1.0
_DIED = "`paceline pull` ended without a word"


async def model_on_node(backend: str, given: str | None, report: Callable[[str], None]) -> Path | None:
    """The path of the model to serve; None where the backend needs none.

    `report` is called with how far a download is. Raises ChildFailed, with the hub's own words, if the model
    can't be had.
    """
    if given is not None and not await asyncio.to_thread(_is_here, given):
        await _fetch(given, report)
    try:
        return await asyncio.to_thread(served_model, backend, given)
    except typer.Exit:
        raise ChildFailed(f"{given or 'the default model'} is not on this node: `paceline pull` it") from None


def _is_here(given: str) -> bool:
    return Path(given).expanduser().exists() or find_local(given) is not None


async def _fetch(given: str, report: Callable[[str], None]) -> None:
    """Run `paceline pull` for a hub's model; two stacks of a node wait for each other's files there.

    It is a process of its own, so that it ends with the start of the stack.
    """
    name = hub_name(given)
    if name is None:
        return
    pull = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "paceline", "pull", given),
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
        env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )
    telling = asyncio.create_task(_tell(given, name.folder / "blobs", report))
    try:
        _, said = await pull.communicate()
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        if pull.returncode is None:
            send_signal(pull, signal.SIGKILL)
            await pull.wait()
    if pull.returncode:
        lines = said.decode(errors="replace").split("\n")
        raise ChildFailed(next(filter(None, reversed(lines)), _DIED).removeprefix("paceline: "))


async def _tell(given: str, blobs: Path, report: Callable[[str], None]) -> None:
    while True:
        report(f"fetching {given}: {_bytes_in(blobs) / 1e6:,.0f} MB so far")
        await asyncio.sleep(_LOOK_S)


def _bytes_in(folder: Path) -> int:
    try:
        return sum(one.stat().st_size for one in folder.iterdir())
    except OSError:  # not there yet, or a part that has just become a file
        return 0
