"""The models at one address: their states, which of them a call means, and lines on the supervisor's socket.

Pure. Who asks for an unknown name leaves nothing behind.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

NAME_RULE = "1 to 128 ASCII letters, digits, '.', '-', '_', ':' and '/', the first a letter or digit"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", re.ASCII)
_MAX_LISTED = 16  # names in a refusal


class ModelState(enum.StrEnum):
    """Of a model."""

    AVAILABLE = enum.auto()  # not loaded
    LOADING = enum.auto()
    SERVING = enum.auto()
    DRAINING = enum.auto()  # it is being put away
    FAILED = enum.auto()  # its processes could not be kept running


class UnknownModelError(Exception):
    """No model has the name."""


@dataclass(frozen=True, slots=True)
class RoutedModel:
    """One model, as the process that keeps its services running tells it."""

    name: str
    state: ModelState
    socket: str = ""  # of its scheduler, while there is one: a path
    detail: str = ""  # what it waits for, or why it failed
    adapters: tuple[str, ...] = ()  # that are loaded from the start
    memory_bytes: int = 0  # planned for it; 0: unknown
    loads: int = 0  # that were begun
    may_load: bool = True  # a request has it loaded: of one that has failed, not at once again

    def __post_init__(self) -> None:
        if not is_model_name(self.name):
            raise ValueError(f"{self.name[:200]!r} can't be a model's name: {NAME_RULE}")

    @property
    def is_held(self) -> bool:
        """Whether the model has processes."""
        return self.state in (ModelState.LOADING, ModelState.SERVING, ModelState.DRAINING)

    @property
    def may_serve_later(self) -> bool:
        """Whether the model will serve after some time if calls want it."""
        return self.state is not ModelState.SERVING and (self.state is not ModelState.FAILED or self.may_load)


@dataclass(frozen=True, slots=True)
class ModelUse:
    """What the router says of the calls that it has: everything, each time that something has changed."""

    read: int = 0  # the version of the models that it knows
    busy: tuple[str, ...] = ()  # models that have streams
    wanted: tuple[str, ...] = ()  # models that calls wait for, the longest waiting first
    unwanted: tuple[str, ...] = ()  # models to be put away

    def line(self) -> bytes:
        """The use as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes) -> ModelUse:
        """The use that such a line says. Raises ValueError, TypeError."""
        said = json.loads(line)
        return cls(said.pop("read"), **{use: tuple(names) for use, names in said.items()})


def is_model_name(text: str) -> bool:
    """Whether a model may have this name."""
    return _NAME.fullmatch(text) is not None


class RoutedModels:
    """All models by name. The first one is what calls mean that name none. `version` rises with changes."""

    def __init__(self, models: Iterable[RoutedModel] = (), version: int = 0) -> None:
        self.version = version
        self._models: Mapping[str, RoutedModel] = {one.name: one for one in models}
        self._by_adapter = {
            adapter: one for one in reversed(self._models.values()) for adapter in one.adapters
        }

    def __iter__(self) -> Iterator[RoutedModel]:
        return iter(self._models.values())

    def __getitem__(self, name: str) -> RoutedModel:
        return self._models[name]

    def meant(self, field: str, key: str) -> RoutedModel:
        """The model of a call. `field`: its request's field `model`. `key`: the model in its metadata.

        A model in the field counts before the metadata, which counts before an adapter in the field: an
        adapter that was loaded later is reached by both together. Raises UnknownModelError.
        """
        if (found := self._models.get(field)) is not None:
            return found
        if key:
            if (found := self._models.get(key) or self._by_adapter.get(key)) is not None:
                return found
            raise self._unknown(key)
        if not field and self._models:
            return next(iter(self))
        if (found := self._by_adapter.get(field)) is not None:
            return found
        raise self._unknown(field)

    def _unknown(self, name: str) -> UnknownModelError:
        names = list(self._models)
        more = ", ..." if len(names) > _MAX_LISTED else ""
        return UnknownModelError(
            f"model: {name[:128]!r} is not served; {', '.join(names[:_MAX_LISTED]) or 'none'}{more} are"
        )

    def line(self) -> bytes:
        """All models as one line of JSON."""
        return json.dumps([self.version, *(asdict(one) for one in self)]).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes) -> RoutedModels:
        """The models of such a line. Raises ValueError, TypeError, KeyError."""
        version, *models = json.loads(line)
        return cls(
            [
                RoutedModel(**{**one, "state": ModelState(one["state"]), "adapters": tuple(one["adapters"])})
                for one in models
            ],
            version,
        )
