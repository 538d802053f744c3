"""The register of wrong executors: `mutant` enters one, `wrap` changes a function of the real executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken promise."""

    name: str
    breaks: str
    check: str  # a file of the kit in which at least one check must fail
    apply: Callable[[], None]
    backend: str  # a target of the kit: what the rest of the executor is


MUTANTS: dict[str, Mutant] = {}


def mutant(backend: str = "oracle") -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Enter a patch by its function's name. Its docstring says what it breaks, its module what catches it."""

    def enter(patch: Callable[[], None]) -> Callable[[], None]:
        name = patch.__name__.replace("_", "-")
        check = f"test_{patch.__module__.rpartition('.')[2]}.py"
        MUTANTS[name] = Mutant(name, str(patch.__doc__), check, patch, backend)
        return patch

    return enter


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace owner.name by `around`, which gets the original as its first argument."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))
