"""`paceline list` and `paceline rm`: the models on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.common import console, fail
from paceline.cli.models.directories import hub_cache, model_directories
from paceline.cli.models.local import LocalModel, find_local, local_models


def list_models() -> None:
    """List the models on this machine: name, format, size, path. `paceline serve NAME` serves one.

    They are in $PACELINE_MODELS (default: .models here, and ~/.cache/paceline/models) and in Hugging Face's
    cache. Those of families that the executor does not compute are refused when they are loaded.
    """
    try:
        found = [
            (model.name, model.format, _size(model.size_bytes), str(model.path)) for model in local_models()
        ]
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    if not found:
        places = ", ".join(str(place) for place in (*model_directories(), hub_cache()))
        fail(f"no models in {places}; `paceline pull` fetches the default model")
    names, formats, sizes, _ = (max(len(row[column]) for row in found) for column in range(4))
    for name, kind, size, path in found:
        console.print(
            f"{name:{names}}  {kind:{formats}}  {size:>{sizes}}  {path}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `paceline list` names it.")],
) -> None:
    """Delete a model from this machine. A running executor goes on with what it has loaded."""
    model = find_local(name)
    if model is None:
        fail(f"{name}: `paceline list` has no model of this name")
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
