"""Live calls by model and caller, and how many each caller may have. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from service_kit.identity import Identity

MAX_CALLS = 1280
"""Live calls of one model, also those that wait for its load: as many as a scheduler runs and queues by
default. Callers share them by weight: one that is below its share may have calls beyond that number, as in a
scheduler's queue, up to twice as many in all."""


_Key: TypeAlias = tuple[str, str]  # kind and name of an identity


class TooManyCallsError(Exception):
    """A caller can't have one more call of a model."""


@dataclass(slots=True)
class _Caller:
    weight: float
    calls: int = 0


class LiveCalls:
    """Counts them."""

    def __init__(self) -> None:
        self._callers: dict[str, dict[_Key, _Caller]] = {}  # by model

    def by_model(self) -> dict[str, int]:
        """The models that have any, with their number."""
        return {model: _calls(callers) for model, callers in list(self._callers.items())}

    @contextmanager
    def counted(self, model: str, caller: Identity) -> Iterator[None]:
        """A context manager: one call. Raises TooManyCallsError if the caller can't have one more."""
        callers = self._callers.get(model, {})
        key = caller.kind, caller.name
        mine = callers.get(key) or _Caller(caller.weight)
        weights = sum(one.weight for one in callers.values() if one is not mine)
        allowed = max(1, int(MAX_CALLS * mine.weight / (mine.weight + weights)))
        if mine.calls >= allowed:
            whose = f", {caller.name}'s share," if weights else ""
            raise TooManyCallsError(f"{allowed} calls of {model}{whose} are under way")
        if (calls := _calls(callers)) >= 2 * MAX_CALLS:
            raise TooManyCallsError(f"{calls} calls of {model} are under way")
        self._callers.setdefault(model, callers)[key] = mine
        mine.calls += 1
        try:
            yield
        finally:
            mine.calls -= 1
            if not mine.calls:
                del callers[key]
            if not callers:
                del self._callers[model]


def _calls(callers: dict[_Key, _Caller]) -> int:
    return sum(one.calls for one in list(callers.values()))
