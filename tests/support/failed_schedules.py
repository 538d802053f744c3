"""A random schedule that failed, as a folder from which another clone runs it again.

    schedule.json  what was drawn: requests, arrivals, what happens to them, sizes
    journal.txt    the steps that were planned, and their answers
    failure.json   the step at which it failed, the error, and the versions of what ran

`python -m tests.replay DIR` runs it again. Hypothesis shrinks a schedule that fails: the folder has the last
one, which is the smallest.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.evaluation import Evaluation, EvaluationInput, HiddenPooling
from scheduler_service.core.request import (
    Continued,
    DraftingWish,
    DraftSource,
    OutputGrammar,
    Request,
    SamplingSettings,
)
from scheduler_service.core.step import Capacity
from tests.unit.scheduler.schedules import Happening, Schedule

FOLDER = Path(os.environ.get("PACELINE_FAILURES", ".failures"))
_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Capacity, Continued, CoreConfig, DraftSource, DraftingWish, Evaluation, EvaluationInput, Happening,
        HiddenPooling, OutputGrammar, Request, SamplingSettings, Schedule,
    )
}  # fmt: skip
_KIND = "@"


def save(folder: Path, schedule: Schedule, step: int, error: BaseException, journal: list[object]) -> None:
    """Write the folder, in the place of what it held."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schedule.json").write_text(json.dumps(_plain(schedule), indent=1))
    (folder / "journal.txt").write_text(text_of(journal))
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    failure = {
        **described(step, error),
        "commit": git.stdout.strip(),
        "python": platform.python_version(),
        "numpy": version("numpy"),
    }
    (folder / "failure.json").write_text(json.dumps(failure, indent=1))


def load(folder: Path) -> tuple[Schedule, dict[str, Any], str]:
    """The schedule, how it failed, and its journal. Raises OSError and ValueError."""
    schedule = _made(json.loads((folder / "schedule.json").read_text()))
    if not isinstance(schedule, Schedule):
        raise ValueError(f"{folder}/schedule.json: not a schedule")
    return schedule, json.loads((folder / "failure.json").read_text()), (folder / "journal.txt").read_text()


def described(step: int, error: BaseException) -> dict[str, Any]:
    """How a schedule failed, in the form of failure.json."""
    return {"step": step, "error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}


def text_of(journal: list[object]) -> str:
    """The journal's entries, a line each, without what each run has its own: addresses and measured times."""
    return re.sub(r" object at 0x\w+|, compute_s=[\w.-]+", "", "".join(f"{entry!r}\n" for entry in journal))


def _plain(value: Any) -> Any:
    """The value as JSON; what JSON has no type for is an object that names its kind."""
    if isinstance(value, Enum):
        return {_KIND: type(value).__name__, "name": value.name}
    if is_dataclass(value):
        parts = {field.name: _plain(getattr(value, field.name)) for field in fields(value) if field.init}
        return {_KIND: type(value).__name__, **parts}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "hex": value.hex()}
    if isinstance(value, frozenset):
        return {_KIND: "frozenset", "items": sorted(map(_plain, value), key=str)}
    if isinstance(value, Mapping):
        return {_KIND: "dict", "items": {name: _plain(item) for name, item in value.items()}}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _made(plain: Any) -> Any:
    """The value that `_plain` made this of. Raises ValueError for other kinds than those of a schedule."""
    if isinstance(plain, list):
        return tuple(map(_made, plain))
    if not isinstance(plain, dict):
        return plain
    kind = plain[_KIND]
    if kind == "bytes":
        return bytes.fromhex(plain["hex"])
    if kind == "frozenset":
        return frozenset(map(_made, plain["items"]))
    if kind == "dict":
        return {name: _made(item) for name, item in plain["items"].items()}
    if kind not in _KINDS:
        raise ValueError(f"{kind!r} is no part of a schedule")
    if issubclass(_KINDS[kind], Enum):
        return _KINDS[kind][plain["name"]]
    return _KINDS[kind](**{name: _made(part) for name, part in plain.items() if name != _KIND})
