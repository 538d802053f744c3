"""The options of `serve` about adapters, and whether their directories are there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.common import fail

AdapterDirectory = Annotated[
    Path | None,
    typer.Option(
        help="Offer adapters (LoRA): an administrator can load PEFT directories below this one.",
        show_default=False,
    ),
]

Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME[=DIRECTORY]",
        help="Load an adapter at the start, from this directory below --adapter-dir. Repeatable.",
    ),
]


def require_adapters(directory: Path | None, adapters: Sequence[str]) -> None:
    """Exit with an error if a directory is missing: that of all adapters, or that of a NAME[=DIRECTORY]."""
    if directory is None:
        if adapters:
            raise typer.BadParameter("--adapter needs the directory of the adapters: --adapter-dir")
        return
    if not directory.is_dir():
        fail(f"--adapter-dir: no directory {directory}", 2)
    for one in adapters:
        name, _, path = one.partition("=")
        if not (directory / (path or name)).is_dir():
            fail(f"--adapter {one}: no directory {directory / (path or name)}", 2)
