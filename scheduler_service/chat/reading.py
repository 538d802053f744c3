"""`ChatReading`: how the output of one chat is to be read."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.chat.formats import ToolFormat
from scheduler_service.chat.reasoning import ReasoningMarkers, Thinking


@dataclass(frozen=True, slots=True)
class ChatReading:
    """What may stand in the output beside text."""

    thinking: Thinking = Thinking.OFF
    reasoning: ReasoningMarkers | None = None  # None: there is none, and `thinking` is OFF
    tool_format: ToolFormat | None = None  # None: the output is not searched for calls
    tool_names: frozenset[str] = frozenset()
