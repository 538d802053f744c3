"""Calls with names and arguments between tags, as of Qwen3-Coder, Seed-OSS, GLM-4.5 and MiniMax-M2."""

from __future__ import annotations

import enum
import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass

from scheduler_service.chat.argument_texts import TextArguments, argument_as_json
from scheduler_service.chat.events import Arguments, CallBegins, Event
from scheduler_service.chat.json_scanner import WHITE_SPACE
from scheduler_service.chat.marked_text import MarkedTextParser

_MAX_WORD = 256  # characters of a tool's or an argument's name, with the tag behind it


@dataclass(frozen=True, slots=True)
class TagSyntax:
    """What stands around the parts of a call. Between tags may be white space."""

    begin: str
    """The marker before one call, or several."""
    end: str
    """The marker behind them."""
    name: tuple[str, str]
    """Around the tool's name; without tags it ends where it can't go on."""
    key: tuple[str, str]
    """Around an argument's name."""
    value: tuple[str, str]
    """Around its value; the first is "" if that begins behind its name."""
    tail: str
    """Behind the last argument; "": the call ends with the marker."""
    padding: str = ""
    """A character within the tags around a value that is no part of it."""


QWEN_CODER = TagSyntax(
    *("<tool_call>", "</tool_call>"),
    ("<function=", ">"),
    ("<parameter=", ">"),
    ("", "</parameter>"),
    "</function>",
    "\n",
)
SEED = TagSyntax(
    *("<seed:tool_call>", "</seed:tool_call>"),
    ("<function=", ">"),
    ("<parameter=", ">"),
    ("", "</parameter>"),
    "</function>",
)
GLM = TagSyntax(
    *("<tool_call>", "</tool_call>"),
    ("", ""),
    ("<arg_key>", "</arg_key>"),
    ("<arg_value>", "</arg_value>"),
    "",
)
MINIMAX = TagSyntax(
    *("<minimax:tool_call>", "</minimax:tool_call>"),
    ('<invoke name="', '">'),
    ('<parameter name="', '">'),
    ("", "</parameter>"),
    "</invoke>",
)


class _TagPlace(enum.Enum):
    TEXT = 0
    HEAD = 1  # before the tag before a name
    NAME = 2
    NAMED = 3  # in the tag behind a name
    BODY = 4  # before an argument, or the call's end
    KEY = 5  # in an argument's name
    OPENING = 6  # before the tag before a value
    VALUE = 7
    BEHIND = 8  # a call
    AFTER = 9  # the end marker


_SPACED = frozenset({_TagPlace.HEAD, _TagPlace.BODY, _TagPlace.OPENING, _TagPlace.BEHIND, _TagPlace.AFTER})
"""Where white space may stand."""


class TaggedParser(MarkedTextParser):
    """Implements `CallParser`: any number of calls, with text before, between and after them.

    A value is a text where its tool's schema says so, and comes as it is written; else it is read as JSON or
    Python's literal when it is complete, and is a text if it is none.
    """

    reasons = False

    def __init__(self, syntax: TagSyntax, tools: Mapping[str, TextArguments], *, by_id: bool) -> None:
        """`tools` that may be called. `by_id`: the outer markers come by `marker`, not in the text."""
        super().__init__((syntax.begin, syntax.end), by_id=by_id)
        self._syntax, self._tools = syntax, tools
        self._place = _TagPlace.TEXT
        self._held: list[str] = []  # what came since the last event: text, unless a call comes of it
        self._word = ""  # the tag or the name that is being read
        self._tool = ""
        self._begun = False  # this call's beginning has been passed on
        self._count = 0  # of this call's arguments
        self._key = ""
        self._value: list[str] = []  # the value that is being read, unless it is passed on
        self._kept = ""  # of a value: its end, which may belong to the tag behind it
        self._is_sent = False  # the value's beginning has been passed on

    def marker(self, marker: str) -> Iterator[Event]:
        """As `CallParser.marker`."""
        if self._place is _TagPlace.VALUE:
            yield from self._text(marker)
        elif marker == self._syntax.begin:
            if self._place in (_TagPlace.BEHIND, _TagPlace.AFTER):  # the end marker may be missing
                self._held.clear()
            yield from self._give_up()
            self._held.append(marker)
            self._begin_call()
        else:
            if not self._syntax.tail and (
                self._place is _TagPlace.BODY or (self._place is _TagPlace.NAME and self._word in self._tools)
            ):
                self._tool = self._tool if self._place is _TagPlace.BODY else self._word
                yield from self._end_call()
            if self._place is _TagPlace.BEHIND:
                self._held.clear()
                self._place = _TagPlace.AFTER
            else:
                self._held.append(marker)
                yield from self._give_up()

    def flush(self) -> Iterator[Event]:
        """As `CallParser.flush`."""
        yield from self._flush_markers()
        if self._place is _TagPlace.VALUE and self._is_sent:
            yield Arguments(json.dumps(self._kept, ensure_ascii=False)[1:-1])
            return
        is_behind = self._place in (_TagPlace.BEHIND, _TagPlace.AFTER) or self._begun
        if is_behind and not "".join(self._held).strip(WHITE_SPACE):
            self._held.clear()
        yield from self._give_up()

    def _begin_call(self) -> None:
        self._word, self._begun, self._count = "", False, 0
        self._place = _TagPlace.HEAD

    def _text(self, text: str) -> Iterator[Event]:
        at = 0
        while at < len(text):
            if self._place is _TagPlace.TEXT:
                yield text[at:]
                return
            if self._place is _TagPlace.VALUE:
                at = yield from self._in_value(text, at)
                continue
            c = text[at]
            self._held.append(c)
            at += 1
            if not self._word and c in WHITE_SPACE and self._place in _SPACED:
                continue
            events = self._in_tag(c)
            if events is None:
                yield from self._give_up()
            else:
                yield from events

    def _in_tag(self, c: str) -> Iterable[Event] | None:
        """Take a character outside of values, and not white space between tags; None: it can't stand here."""
        syntax = self._syntax
        if self._place is _TagPlace.HEAD and not syntax.name[0]:
            self._place = _TagPlace.NAME
        if self._place is _TagPlace.NAME:
            if (c.isascii() and c.isalnum()) or c in "_-":
                self._word += c
                return () if len(self._word) < _MAX_WORD else None
            self._tool, self._word = self._word, ""
            if self._tool not in self._tools:
                return None
            self._place = _TagPlace.NAMED if syntax.name[1] else _TagPlace.BODY
            if self._place is _TagPlace.BODY and c in WHITE_SPACE:
                return ()
        self._word += c
        if self._place is _TagPlace.KEY:
            if self._word.endswith(syntax.key[1]):
                self._key, self._word = self._word.removesuffix(syntax.key[1]), ""
                self._place = _TagPlace.OPENING
                if not syntax.value[0]:
                    self._begin_value()
            return () if len(self._word) < _MAX_WORD else None
        expected = self._expected()
        if self._word in expected:
            found, self._word = self._word, ""
            if self._place is _TagPlace.BODY and found == syntax.tail:
                return self._end_call()
            self._go_on()
            return ()
        return () if any(tag.startswith(self._word) for tag in expected) else None

    def _expected(self) -> tuple[str, ...]:
        """The tags that may stand here."""
        syntax = self._syntax
        match self._place:
            case _TagPlace.HEAD:
                return (syntax.name[0],)
            case _TagPlace.NAMED:
                return (syntax.name[1],)
            case _TagPlace.BODY:
                return (syntax.key[0], syntax.tail) if syntax.tail else (syntax.key[0],)
            case _TagPlace.OPENING:
                return (syntax.value[0],)
            case _TagPlace.BEHIND if syntax.tail:
                return (syntax.name[0],)
        return ()

    def _go_on(self) -> None:
        """Behind a tag."""
        match self._place:
            case _TagPlace.HEAD:
                self._place = _TagPlace.NAME
            case _TagPlace.BEHIND:
                self._begin_call()
                self._place = _TagPlace.NAME
            case _TagPlace.NAMED:
                self._place = _TagPlace.BODY
            case _TagPlace.BODY:
                self._place = _TagPlace.KEY
            case _:
                self._begin_value()

    def _begin_value(self) -> None:
        self._place, self._kept, self._is_sent = _TagPlace.VALUE, "", False
        self._value.clear()

    def _in_value(self, text: str, at: int) -> Generator[Event, None, int]:
        """Take more of a value; returns where `text` goes on behind it."""
        end, kept = self._syntax.value[1], self._kept
        joined = kept + text[at : at + len(end) - 1]
        if kept and (found := joined.find(end)) >= 0:  # the tag was cut
            behind, piece = at + found + len(end) - len(kept), joined[:found]
        elif (found := text.find(end, at)) >= 0:
            behind, piece = found + len(end), kept + text[at:found]
        else:
            whole = kept + text[at:]
            tails = (self._syntax.padding[:1] + end, end)
            size = max(_overlap(whole, tail) for tail in tails)
            self._kept = whole[len(whole) - size :]
            self._held.append(text[at:])
            yield from self._more(whole[: len(whole) - size])
            return len(text)
        self._kept = ""
        self._held.append(text[at:behind])
        if self._syntax.padding:
            piece = piece.removesuffix(self._syntax.padding)
        yield from self._more(piece)
        yield from self._end_value()
        return behind

    def _more(self, piece: str) -> Iterator[Event]:
        """A piece of the value."""
        if not piece:
            return
        if self._syntax.padding and not self._value:
            self._value.append("")
            piece = piece.removeprefix(self._syntax.padding)
        if self._tools[self._tool].get(self._key) == frozenset():
            before = "" if self._is_sent else self._before_value() + '"'
            self._is_sent = True
            yield from self._say(before + json.dumps(piece, ensure_ascii=False)[1:-1])
        else:
            self._value.append(piece)

    def _end_value(self) -> Iterator[Event]:
        if self._is_sent:
            written = '"'
        else:
            written = argument_as_json("".join(self._value), self._tools[self._tool].get(self._key))
            written = self._before_value() + written
        self._count += 1
        self._place = _TagPlace.BODY
        yield from self._say(written)

    def _before_value(self) -> str:
        return f"{', ' if self._count else '{'}{json.dumps(self._key, ensure_ascii=False)}: "

    def _end_call(self) -> Iterator[Event]:
        yield from self._say("}" if self._count else "{}")
        self._place = _TagPlace.BEHIND

    def _say(self, arguments: str) -> Iterator[Event]:
        """Pass arguments on, with the call's beginning if these are the first."""
        self._held.clear()
        if not self._begun:
            self._begun = True
            yield CallBegins(self._tool)
        yield Arguments(arguments)

    def _give_up(self) -> Iterator[Event]:
        """What was held is text."""
        text = "".join(self._held)
        self._held.clear()
        self._place, self._begun = _TagPlace.TEXT, False
        if text:
            yield text


def _overlap(text: str, tag: str) -> int:
    """Characters at the end of a text that the tag may begin with, without being complete."""
    sizes = range(min(len(text), len(tag) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(tag[:size])), 0)
