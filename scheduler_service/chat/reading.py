"""`ChatReading`: how the output of one chat is to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_service.chat.argument_texts import TextArguments
from scheduler_service.chat.formats import ToolFormat
from scheduler_service.chat.reasoning import ReasoningMarkers, Thinking


@dataclass(frozen=True, slots=True)
class ChatReading:
    """What may stand in the output beside text."""

    thinking: Thinking = Thinking.OFF
    reasoning: ReasoningMarkers | None = None  # None: there is none, and `thinking` is OFF
    tool_format: ToolFormat | None = None  # None: the output is not searched for calls
    tools: Mapping[str, TextArguments] = field(default_factory=dict)
    """Those of the request by name; where the format is typed, with their arguments that may be texts."""
