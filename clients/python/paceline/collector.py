"""Joins the events of a stream into completions. Pure; shared by the blocking and the asyncio client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic

from paceline.chat import ToolCall, ToolCallDelta
from paceline.schemas import Parsed, SchemaLike
from paceline.types import Completion, Delta, Event, Finished, TokenLogprobs


@dataclass(slots=True)
class _Joined:
    """The events of one completion, joined."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[list[ToolCallDelta]] = field(default_factory=list)
    finished: Finished | None = None

    def add(self, delta: Delta) -> None:
        if delta.text:
            self.text.append(delta.text)
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        for call in delta.tool_calls:
            if call.index == len(self.calls):
                self.calls.append([])
            self.calls[call.index].append(call)

    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(deltas[0].id, deltas[0].name, "".join(delta.arguments for delta in deltas))
            for deltas in self.calls
        )


class Collector(Generic[Parsed]):
    """Joins the events of one stream. `schema` is the request's."""

    def __init__(self, schema: SchemaLike[Parsed] | None = None) -> None:
        self._schema = schema
        self._joined: dict[int, _Joined] = {}

    def add(self, event: Event) -> None:
        """Add the next event of the stream."""
        joined = self._joined.setdefault(event.index, _Joined())
        if isinstance(event, Delta):
            joined.add(event)
        else:
            joined.finished = event

    def completions(self) -> list[Completion[Parsed]]:
        """The completions received so far, ordered by index."""
        return [
            Completion(
                index=index,
                text="".join(one.text),
                token_ids=tuple(one.token_ids),
                logprobs=tuple(one.logprobs),
                finished=one.finished,
                reasoning="".join(one.reasoning),
                tool_calls=one.tool_calls(),
                schema=self._schema,
            )
            for index, one in sorted(self._joined.items())
        ]
