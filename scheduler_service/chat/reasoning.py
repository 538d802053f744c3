"""Reasoning: what some models write between two markers before their answer, and where it begins."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PAIRS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))
MARKERS = tuple(marker for pair in _PAIRS for marker in pair)
FIELDS = ("reasoning_content", "reasoning", "thinking")
"""What chat templates call the reasoning of a message that is sent back; each template knows one of them."""
_READ = re.compile(rf"""\.(?:{"|".join(FIELDS)})\b|['"](?:{"|".join(FIELDS)})['"]""")
_MAX_TAIL = 8  # tokens of white space that may stand around the markers at a prompt's end


class Thinking(enum.Enum):
    """How a completion begins."""

    INSIDE = "inside"  # the prompt has opened the reasoning
    POSSIBLE = "possible"  # the model may open it
    OFF = "off"  # the prompt has closed it, or continues an answer


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The token ids around a model's reasoning, and their texts."""

    begin: int
    end: int
    texts: tuple[str, str]

    def thinking(self, prompt: Sequence[int], token_bytes: Mapping[int, bytes]) -> Thinking:
        """How a completion of this prompt begins; what follows a turn's beginning is looked at alone."""
        tail = _bare(prompt, len(prompt), token_bytes)
        if not tail:
            return Thinking.POSSIBLE
        if prompt[tail - 1] == self.begin:
            return Thinking.INSIDE
        return Thinking.OFF if prompt[tail - 1] == self.end else Thinking.POSSIBLE

    def thinking_in(self, content: str) -> Thinking:
        """How a completion begins that continues a message with this content."""
        begin, end = map(content.rfind, self.texts)
        return Thinking.INSIDE if begin > end else Thinking.OFF


def reasoning_markers(template: str, added: Mapping[str, int]) -> ReasoningMarkers | None:
    """The markers of a model whose chat template knows them, and which has tokens for them."""
    for begin, end in _PAIRS:
        if begin in added and end in added and end in template:
            return ReasoningMarkers(added[begin], added[end], (begin, end))
    return None


def takes_reasoning(template: str) -> bool:
    """Whether a chat template reads the reasoning of a message."""
    return any(map(_READ.search, code_of(template)))


def code_of(template: str) -> list[str]:
    """The expressions and statements of a chat template, with their braces.

    What opens none after the last end is cut off first: the search would go to the end for each of them.
    """
    end = max(template.rfind("}}"), template.rfind("%}")) + 2
    return re.findall(r"{[{%].*?[%}]}", template[:end], re.DOTALL)


def _bare(prompt: Sequence[int], end: int, token_bytes: Mapping[int, bytes]) -> int:
    """Where the white space begins that the first `end` tokens of a prompt end with."""
    for at in range(end, max(end - _MAX_TAIL, 0), -1):
        piece = token_bytes[prompt[at - 1]]
        if not piece or piece.strip():
            return at
    return 0
