"""Answers of chats and completions: what all have, and streams of chunks."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from paceline import Event, Finished
from paceline.aio import Generation

from paceline_openai.calls import Call
from paceline_openai.usage import in_order, usage


def head(call: Call, id_: str, kind: str, begun: Iterable[Generation]) -> dict[str, Any]:
    """The fields of an answer, and of each of its chunks, beside `choices` and `usage`.

    `begun`: what gave it, as far as that has begun. Raises Refusal if those are of different models.
    """
    return {
        "id": id_,
        "object": kind,
        "created": call.created,
        "model": call.shown_model,
        "system_fingerprint": call.fingerprint(begun),
    }


class Chunks(ABC):
    """The events of a stream, as chunks. A subclass writes the choices. `generations`: of each prompt."""

    def __init__(self, call: Call, id_: str, kind: str, generations: Sequence[Generation]) -> None:
        self._call, self._id, self._kind = call, id_, kind
        self._generations = generations
        self._begun = dict[int, Generation]()  # by the place of the prompt
        self._head = ""
        self._with_usage = bool(call.values.get("stream_options", {}).get("include_usage"))
        self._tail = ', "usage": null}\n\n' if self._with_usage else "}\n\n"

    @abstractmethod
    async def choices(self, place: int, event: Event) -> list[str]:
        """The JSON of the choices of an event of prompt `place`, each of which is a chunk."""

    async def send(self, events: AsyncGenerator[tuple[int, Event], None]) -> None:
        """Send the whole answer: (place of the prompt, event) as they come.

        Raises Refusal, `paceline.errors`.
        """
        exchange, ends = self._call.exchange, [list[Finished]() for _ in self._generations]
        async with aclosing(events):
            async for place, event in events:
                if place not in self._begun:
                    self._begin(place)
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

    def _begin(self, place: int) -> None:
        """A prompt's stream has begun: the model that gives it is known, and must be the first one's."""
        self._begun[place] = self._generations[place]
        first = next(iter(self._begun.values()))
        shown = head(self._call, self._id, self._kind, [first, self._generations[place]])
        self._head = f"data: {json.dumps(shown)[:-1]}, "

    def _chunk(self, choice: str) -> str:
        return f'{self._head}"choices": [{choice}]{self._tail}'
