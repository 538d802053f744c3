"""Texts of one request that are tokenized together, each with the request's field that it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scheduler_service.chat.tools import SentTool


@dataclass(frozen=True, slots=True)
class PlainItem:
    """Text without a template."""

    field: str
    text: str
    begins: bool = True
    """A prompt begins with it: BOS is in front if the tokenizer's configuration says so."""

    def sent(self) -> dict[str, object]:
        """As the tokenizer process reads it."""
        return {"field": self.field, "text": self.text, "begins": self.begins}


@dataclass(frozen=True, slots=True)
class WholeItem:
    """Text with all the tokens that the tokenizer's post-processor puts around it: one to be embedded."""

    field: str
    text: str
    varies: bool = False
    """It may not begin with a token of the post-processor, which would be the same for all texts."""

    def sent(self) -> dict[str, object]:
        """As the tokenizer process reads it."""
        return {"field": self.field, "whole": self.text, "varies": self.varies}


@dataclass(frozen=True, slots=True)
class ChatItem:
    """Messages for the chat template."""

    field: str
    messages: Sequence[Mapping[str, object]]
    arguments: Mapping[str, object] = dataclasses.field(default_factory=dict)
    tools: Sequence[SentTool] = ()
    continues: bool = False
    opens: bool = True

    def sent(self) -> dict[str, object]:
        """As the tokenizer process reads it."""
        chat = {
            "messages": self.messages,
            "arguments": dict(self.arguments),
            "tools": list(self.tools),
            "continues": self.continues,
            "opens": self.opens,
        }
        return {"field": self.field, "chat": chat}


TextItem = PlainItem | WholeItem | ChatItem
