"""The roof as its router sees it: the models that are told, and asking for one to be loaded or put away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

from service_kit.logs import Log

from paceline_router.models import RoofModel, RoofModels, RoofState

log = Log(__name__)

MAX_LINE_BYTES = 1 << 20
_AGAIN_S = 0.2

Wish = Literal["load", "unload"]


class Roof:
    """Follows the models over the Unix socket of the process that keeps them running.

    `told` is awaited after each line, and then the process learns how many lines were read.
    """

    def __init__(self, socket: Path, told: Callable[[RoofModels], Awaitable[None]]) -> None:
        self.models = RoofModels()
        self._socket, self._told = socket, told
        self._writer: asyncio.StreamWriter | None = None
        self._change = asyncio.Event()  # replaced at each change

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(self._socket, limit=MAX_LINE_BYTES)
                lines = 0
                while line := await reader.readline():
                    self.models, lines = RoofModels.of(line), lines + 1
                    self._changed()
                    await self._told(self.models)
                    self._say({"read": lines})
            except (OSError, ValueError, TypeError, KeyError) as error:
                log.warning("the models can't be followed", detail=str(error))
            finally:
                if self._writer is not None:
                    self._writer.close()
                    self._writer = None
            await asyncio.sleep(_AGAIN_S)

    def wish(self, wish: Wish, name: str) -> None:
        """Ask for a model to be loaded, or put away; what becomes of it is told."""
        self._say({"wish": wish, "model": name})

    async def changed(self) -> None:
        """Wait until something was told."""
        await self._change.wait()

    async def settled(self, name: str) -> RoofModel:
        """The model, once it serves, or won't: it has failed, or was put away while it was loading."""
        asked = False
        while (model := self.models[name]).state is RoofState.LOADING or (
            model.state is RoofState.AVAILABLE and not asked
        ):
            asked = asked or model.state is RoofState.LOADING
            await self.changed()
        return model

    def _say(self, message: dict[str, object]) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(message).encode() + b"\n")

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
