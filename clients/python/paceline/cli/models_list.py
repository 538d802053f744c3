"""`paceline list` and `paceline rm`: the models on this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from service_kit.known import nearest

from paceline.cli.common import console, fail
from paceline.cli.models.directories import hub_cache, model_directories
from paceline.cli.models.local import LocalModel, find_local, local_models
from paceline.cli.rows import print_aligned


def list_models(
    *, as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False
) -> None:
    """List the models on this machine: name, format, size, path. `paceline serve NAME` serves one.

    They are in $PACELINE_MODELS (default: .models here, and ~/.cache/paceline/models) and in Hugging Face's
    cache. Those of families that the executor does not compute are refused when they are loaded.
    """
    try:
        found = [(one, one.size_bytes) for one in local_models()]
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    if as_json:
        for one, size in found:
            line = {"name": one.name, "format": one.format, "bytes": size, "path": str(one.path)}
            typer.echo(json.dumps(line))
        return
    if not found:
        places = ", ".join(str(place) for place in (*model_directories(), hub_cache()))
        fail(f"no models in {places}; `paceline pull` fetches the default model")
    rows = [(one.name, one.format, _size(size), str(one.path)) for one, size in found]
    print_aligned(console, rows, right=[2])


def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `paceline list` names it.")],
) -> None:
    """Delete a model from this machine. A running executor goes on with what it has loaded."""
    model = find_local(name)
    if model is None:
        known = {one.name for one in local_models()}
        fail(f"{name}: `paceline list` has no model of this name{nearest(name, known)}")
    freed = _removed(model)
    console.print(f"{model.path}: deleted, {_size(freed)}", highlight=False, markup=False, soft_wrap=True)


def _removed(model: LocalModel) -> int:
    try:
        size = model.size_bytes
        model.remove()
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    return size


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"
