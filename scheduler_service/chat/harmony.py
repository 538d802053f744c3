"""OpenAI's harmony format (gpt-oss): an output is messages, each in a channel, and one of them may be a call.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}
"""

from __future__ import annotations

import enum
import re
from collections.abc import Container, Iterator

from scheduler_service.chat.events import Arguments, CallBegins, Event, Reasoning
from scheduler_service.chat.json_scanner import WHITE_SPACE, JsonScanner
from scheduler_service.chat.marked_text import MarkedTextParser

MARKERS = START, CHANNEL, CONSTRAIN, MESSAGE, END = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
)
OPTIONAL_MARKERS = CALL, RETURN = "<|call|>", "<|return|>"
"""Both end a message too; they are ends of sequences, so that they hardly ever come."""

_ENDS = frozenset({END, CALL, RETURN})
_MAX_HEADER = 256  # characters; what is longer is text
_TO = r"(?:\s++to=(?P<{}>[^\s<]++))?"
_HEADER = re.compile(  # possessive: else spaces before what is no header are shared out in every way
    rf"(?:{re.escape(START)}assistant)?{_TO.format('early')}\s*+"
    rf"(?:{re.escape(CHANNEL)}(?P<channel>\w++){_TO.format('late')}\s*+(?:{re.escape(CONSTRAIN)})?\s*+\w*+\s*+)?"
)


_OPENING = f"{START}assistant"


class _Place(enum.Enum):
    HEADER = 0  # what was held may be a header
    REASONING = 1
    TEXT = 2  # of the answer, or of what can't be read otherwise
    CALL = 3
    BETWEEN = 4  # after a message


_CHANNELS: dict[str | None, _Place] = {
    "analysis": _Place.REASONING,
    "commentary": _Place.TEXT,
    "final": _Place.TEXT,
    None: _Place.TEXT,
}


class HarmonyParser(MarkedTextParser):
    """Implements `CallParser`; it reads the reasoning as well.

    A line break stands between two messages that are reasoning, and between two that are text. What is
    neither, such as the message of another role, a call of an unknown tool or a header that is none, is text
    with its markers.
    """

    def __init__(self, names: Container[str], *, by_id: bool = True, continues: bool = False) -> None:
        """`names` of the tools that may be called. `by_id`: markers come by `marker`, not in the text.

        `continues`: the output goes on with the text of an answer; else it begins with a header, whose
        start the prompt has.
        """
        super().__init__((*MARKERS, *OPTIONAL_MARKERS), by_id=by_id)
        self._names = names
        self._place = _Place.TEXT if continues else _Place.HEADER
        self._held = "" if continues else _OPENING
        self._implied = len(self._held)  # characters of a header that the prompt has
        self._tool = ""  # of a call that has not begun
        self._scanner: JsonScanner | None = None  # of the call's arguments; None: they have not begun
        self._said: set[_Place] = set()  # places of which there was text
        self._is_new = False  # nothing of this message has come out

    @property
    def reasons(self) -> bool:
        """What comes now is reasoning."""
        return self._place is _Place.REASONING

    def marker(self, marker: str) -> Iterator[Event]:
        """As `CallParser.marker`."""
        if self._place is _Place.HEADER:
            if marker == MESSAGE:
                yield from self._begin_message()
                return
            if marker in (CHANNEL, CONSTRAIN) and marker not in self._held:
                yield from self._header(marker)
                return
            yield from self._give_up()
        if marker in _ENDS and self._place is not _Place.BETWEEN:
            yield from self._end_message()
            self._place = _Place.BETWEEN
        elif marker in (START, CHANNEL):
            yield from self._end_message()
            self._place, self._held = _Place.HEADER, marker
        else:
            yield from self._text(marker)

    def flush(self) -> Iterator[Event]:
        """As `CallParser.flush`."""
        yield from self._flush_markers()
        if self._place is _Place.HEADER:
            yield from self._give_up()
        else:
            yield from self._end_message()

    def _text(self, text: str) -> Iterator[Event]:
        match self._place:
            case _Place.HEADER:
                yield from self._header(text)
            case _Place.CALL:
                yield from self._argument(text)
            case _Place.BETWEEN:
                self._held += text  # which was white space before
                if text.strip(WHITE_SPACE):
                    yield from self._give_up()
            case _:
                yield from self._say(text)

    def _header(self, text: str) -> Iterator[Event]:
        """Take more of a header, as long as it can become one."""
        self._held += text
        own = self._held.removeprefix(START)
        behind = own.removeprefix("assistant").lstrip(WHITE_SPACE)
        can_be = "assistant".startswith(own) or (own.startswith("assistant") and "to=".startswith(behind[:3]))
        if not (can_be or CHANNEL in own) or len(own) > _MAX_HEADER:
            yield from self._give_up()

    def _begin_message(self) -> Iterator[Event]:
        """The header is complete."""
        found = _HEADER.fullmatch(self._held)
        to, channel = (found["early"] or found["late"], found["channel"]) if found else (None, "")
        self._tool = (to or "").removeprefix("functions.")
        self._held += MESSAGE
        if to is None and channel in _CHANNELS:
            self._raw_header()
            self._place, self._is_new = _CHANNELS[channel], True
        elif self._tool in self._names and channel != "final":
            self._place, self._scanner, self._held = _Place.CALL, None, self._raw_header()
        else:
            yield from self._give_up()

    def _argument(self, text: str) -> Iterator[Event]:
        """Take more of a call, which begins with its arguments' brace; before it and after them is space."""
        if self._scanner is None:
            bare = text.lstrip(WHITE_SPACE)
            self._held += text[: len(text) - len(bare)]
            if not bare.startswith("{"):
                if bare:
                    yield from self._give_up(bare)
                return
            self._held, self._scanner, text = "", JsonScanner(), bare
            yield CallBegins(self._tool)
        if not self._scanner.done:
            end = self._scanner.push(text)
            if end:
                yield Arguments(text[:end])
            text = text[end:]
        self._held += text  # which was white space before
        if self._scanner.failed or text.strip(WHITE_SPACE):
            yield from self._give_up()

    def _end_message(self) -> Iterator[Event]:
        """A call that has not begun is text; white space after arguments is left out."""
        if self._place is _Place.CALL and self._scanner is None:
            yield from self._give_up()
        self._held = ""

    def _give_up(self, rest: str = "") -> Iterator[Event]:
        """What was held is text, and `rest` after it."""
        self._place, self._is_new = _Place.TEXT, True
        yield from self._say(self._raw_header() + rest)

    def _raw_header(self) -> str:
        """What was held, without what the prompt has; nothing is held any more."""
        held, self._held, self._implied = self._held[self._implied :], "", 0
        return held

    def _say(self, text: str) -> Iterator[Event]:
        if not text:
            return
        if self._is_new and self._place in self._said:
            text = "\n" + text
        self._is_new = False
        self._said.add(self._place)
        yield Reasoning(text) if self._place is _Place.REASONING else text
