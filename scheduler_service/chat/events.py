"""What a parser finds in a completion's text, in order: text, calls with arguments in pieces, reasoning."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class CallBegins(NamedTuple):
    """A call of this tool begins; its arguments follow."""

    name: str


class Arguments(NamedTuple):
    """A piece of the arguments of the call that began last: JSON, if all pieces are joined."""

    text: str


class Reasoning(NamedTuple):
    """A piece of the reasoning, of formats whose parsers read that as well."""

    text: str


Event = str | CallBegins | Arguments | Reasoning
"""A string is text that belongs to no call."""


class CallParser(Protocol):
    """Finds calls in the text of one completion. Any split of the text gives the same events, joined.

    What is no call of a known tool is text. From a call's beginning on, its arguments are passed on as they
    come; if they turn out to be malformed, they end before the character at fault, and text follows. White
    space and markers around calls belong to them. Everything else comes out again.
    """

    @property
    def reasons(self) -> bool:
        """What comes now is reasoning."""

    def push(self, text: str) -> Iterable[Event]:
        """Take more text."""

    def marker(self, marker: str) -> Iterable[Event]:
        """Take a marker that came as a token of its own; only where markers are matched by id."""

    def flush(self) -> Iterable[Event]:
        """What was held back, when no more text follows."""


@dataclass(slots=True)
class CallPiece:
    """A part of a call on its way to the client; the first one of a call has its id and name."""

    index: int  # of the call in its completion
    id: str
    name: str
    arguments: str
