"""Answers of chats and completions: what all have, and streams of chunks."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from paceline import Event, Finished

from paceline_openai.calls import Call
from paceline_openai.usage import in_order, usage


def head(call: Call, id_: str, kind: str) -> dict[str, Any]:
    """The fields of an answer, and of each of its chunks, beside `choices` and `usage`."""
    return {
        "id": id_,
        "object": kind,
        "created": call.created,
        "model": call.shown_model,
        "system_fingerprint": call.fingerprint,
    }


class Chunks(ABC):
    """The events of a stream, as chunks. A subclass writes the choices."""

    def __init__(self, call: Call, id_: str, kind: str) -> None:
        self._call = call
        self._head = f"data: {json.dumps(head(call, id_, kind))[:-1]}, "
        self._with_usage = bool(call.values.get("stream_options", {}).get("include_usage"))
        self._tail = ', "usage": null}\n\n' if self._with_usage else "}\n\n"

    @abstractmethod
    async def choices(self, place: int, event: Event) -> list[str]:
        """The JSON of the choices of an event of prompt `place`, each of which is a chunk."""

    async def send(self, events: AsyncGenerator[tuple[int, Event], None], prompts: int) -> None:
        """Send the whole answer: (place of the prompt, event) as they come. Raises `paceline.errors`."""
        exchange, ends = self._call.exchange, [list[Finished]() for _ in range(prompts)]
        async with aclosing(events):
            async for place, event in events:
                if isinstance(event, Finished):
                    ends[place].append(event)
                choices = await self.choices(place, event)
                if not exchange.status:
                    await exchange.start_events()
                await exchange.write("".join(map(self._chunk, choices)).encode())
        last = "data: [DONE]\n\n"
        if self._with_usage:
            counts = json.dumps(usage([in_order(one) for one in ends]))
            last = f'{self._head}"choices": [], "usage": {counts}}}\n\n{last}'
        await exchange.write(last.encode(), more=False)

    def _chunk(self, choice: str) -> str:
        return f'{self._head}"choices": [{choice}]{self._tail}'
