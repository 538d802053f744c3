"""The router's connection to `serve`: the models come from it, and what its calls use goes there."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from service_kit.logs import Log

from paceline_router.models import ModelUse, RoutedModel, RoutedModels

log = Log(__name__)

MAX_LINE_BYTES = 1 << 20
_AGAIN_S = 0.2

Use = Literal["busy", "wanted", "unwanted"]
"""Of a model, by calls: streams that it has; calls that wait for it; calls that have it put away."""


class SupervisorConnection:
    """Follows the models over the Unix socket of the process that keeps them running.

    That process learns all uses at once whenever one begins or ends, and after a connection was lost: nothing
    that a call waits for can be forgotten. `on_models` is awaited after each line.
    """

    def __init__(self, socket: Path, on_models: Callable[[RoutedModels], Awaitable[None]]) -> None:
        self.models = RoutedModels()
        self.closing = False
        self._socket, self._on_models = socket, on_models
        self._writer: asyncio.StreamWriter | None = None
        self._change = asyncio.Event()  # replaced at each change
        self._uses: dict[Use, Counter[str]] = {"busy": Counter(), "wanted": Counter(), "unwanted": Counter()}
        self._saying = False  # it will be said what they are

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(self._socket, limit=MAX_LINE_BYTES)
                while line := await reader.readline():
                    self.models = RoutedModels.of(line)
                    self._changed()
                    await self._on_models(self.models)
                    self._say_soon()
            except (OSError, ValueError, TypeError, KeyError) as error:
                log.warning("the models can't be followed", detail=str(error))
            finally:
                if self._writer is not None:
                    self._writer.close()
                    self._writer = None
            await asyncio.sleep(_AGAIN_S)

    def close(self) -> None:
        """Let nobody wait for a model any more."""
        self.closing = True
        self._changed()

    @contextmanager
    def using(self, use: Use, name: str) -> Iterator[None]:
        """A context manager: a call uses a model so within the block."""
        counts = self._uses[use]  # in the order in which their first ones began
        counts[name] += 1
        if counts[name] == 1:
            self._say_soon()
        try:
            yield
        finally:
            counts[name] -= 1
            if not counts[name]:
                del counts[name]
                self._say_soon()

    async def changed(self) -> None:
        """Wait for the next line."""
        await self._change.wait()

    async def known(self) -> None:
        """Wait until it is known which models there are."""
        while not self.models.version:
            await self.changed()

    async def served(self, name: str) -> RoutedModel:
        """The model, once it serves, or won't; it is loaded for this call if it isn't."""
        with self.using("wanted", name):
            while (model := self.models[name]).may_serve_later and not self.closing:
                await self.changed()
        return model

    async def put_away(self, name: str) -> bool:
        """Have a model put away, and wait for that, or for `close`; False: it was not loaded."""
        before = self.models[name]
        with self.using("unwanted", name):
            while (model := self.models[name]).is_held and model.loads == before.loads and not self.closing:
                await self.changed()
        return before.is_held

    def _say_soon(self) -> None:
        """Tell the supervisor how calls use the models, once for all changes until then."""
        if not self._saying:
            self._saying = True
            asyncio.get_running_loop().call_soon(self._say)

    def _say(self) -> None:
        """Tell the supervisor how calls use the models, if it is connected."""
        self._saying = False
        if self._writer is not None:
            use = ModelUse(self.models.version, *(tuple(self._uses[one]) for one in self._uses))
            self._writer.write(use.line())

    def _changed(self) -> None:
        """Wake those who wait for a change."""
        self._change.set()
        self._change = asyncio.Event()
