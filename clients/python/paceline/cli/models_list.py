"""`paceline list`: the models on this machine."""

from __future__ import annotations

from paceline.cli.common import console, fail
from paceline.cli.local_models import hub_cache, local_models
from paceline.cli.models import models_directory


def list_models() -> None:
    """List the models on this machine: name, size, path. `paceline serve NAME` serves one.

    They are in $PACELINE_MODELS (default: .models) and in Hugging Face's cache. Those of families that the
    executor does not compute are refused when they are loaded.
    """
    try:
        found = [(model.name, _size(model.size_bytes), str(model.path)) for model in local_models()]
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    if not found:
        fail(f"no models in {models_directory()} or {hub_cache()}; `paceline pull` fetches the default model")
    names, sizes, _ = (max(len(row[column]) for row in found) for column in range(3))
    for name, size, path in found:
        console.print(
            f"{name:{names}}  {size:>{sizes}}  {path}", highlight=False, markup=False, soft_wrap=True
        )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"
