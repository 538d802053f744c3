"""`Conversation`: the turns and options of `paceline chat`, and the commands that change them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from paceline.bounded_files import read_bounded
from paceline.chat import Message
from paceline.requests import Options

COMMANDS = {
    "/system": "TEXT  a system message from now on; without TEXT: none",
    "/set": "NAME VALUE  an option of answers, as /set temperature 0.7; VALUE default: not set; alone: show",
    "/retry": "ask the last question again: another answer, unless a seed is set or the temperature is 0",
    "/undo": "forget the last question and its answer",
    "/reset": "forget the conversation",
    "/save": "FILE  write the conversation, as messages of the OpenAI API in JSON",
    "/load": "FILE  go on with such a conversation",
    "/help": "show this",
    "/quit": "leave, as Ctrl-D does",
}
HELP = "\n".join(
    [
        *(f"{name:<8} {what}" for name, what in COMMANDS.items()),
        '"""      begins a question of several lines, and ends it',
        "Ctrl-C   stops an answer, or gives up a line",
    ]
)
_COMMAND = re.compile(r"(/[a-z]+)(?: +([^\n]*))?")
WITH_WORDS = ("/system", "/set", "/save", "/load")
"""Commands that take an argument."""
_NUMBERS: dict[str, tuple[type[int] | type[float], float, float]] = {
    "temperature": (float, 0, 100),
    "top_p": (float, 0, 1),
    "top_k": (int, 0, 2**32 - 1),
    "min_p": (float, 0, 1),
    "seed": (int, 0, 2**64 - 1),
    "max_tokens": (int, 1, 2**32 - 1),
    "repetition_penalty": (float, 0, 100),
    "presence_penalty": (float, -100, 100),
    "frequency_penalty": (float, -100, 100),
}
"""What /set takes, and between which numbers; the scheduler checks it too."""
_MAX_BYTES = 16 << 20
_ROLES = ("system", "user", "assistant")


class Refused(Exception):
    """A command can't be done; the message says why."""


@dataclass
class Conversation:
    """`turns`: questions and answers in turn. A failed question is not among them."""

    options: Options
    system: str = ""
    turns: list[Message] = field(default_factory=list)

    def asking(self, question: str) -> list[Message]:
        """The messages of a request for the next answer."""
        opening = [Message("system", self.system)] if self.system else []
        return [*opening, *self.turns, Message("user", question)]

    def answered(self, question: str, answer: str) -> None:
        """Add a turn."""
        self.turns += [Message("user", question), Message("assistant", answer)]

    def undo(self) -> str:
        """Forget the last turn; returns its question. Raises Refused without one."""
        if not self.turns:
            raise Refused("nothing was asked yet")
        question = self.turns[-2].content
        del self.turns[-2:]
        return question

    def set(self, text: str) -> str:
        """Change an option, or show all; returns what there is to say. Raises Refused."""
        if not text:
            found = [f"{name}: {value}" for name, value in self.options.items() if value is not None]
            return "\n".join(found) or "all are the server's defaults"
        name, _, value = text.replace("=", " ", 1).partition(" ")
        name = name.replace("-", "_")
        if name not in _NUMBERS:
            raise Refused(f"there is no option {name}; there are {', '.join(_NUMBERS)}")
        options = cast(dict[str, Any], self.options)
        if value.strip() in ("", "default"):
            options.pop(name, None)
            return f"{name}: the default"
        kind, low, high = _NUMBERS[name]
        try:
            number = kind(value)
        except ValueError:
            expected = "a whole number" if kind is int else "a number"
            raise Refused(f"{name}: {value.strip()} is not {expected}") from None
        if not low <= number <= high:
            raise Refused(f"{name}: {number} is not within [{low:g}, {high:g}]")
        options[name] = number
        return f"{name}: {options[name]}"

    def save(self, name: str) -> str:
        """Write it; returns what there is to say. Raises Refused if there is such a file, or none can be."""
        messages = [{"role": turn.role, "content": turn.content} for turn in self.asking("")[:-1]]
        text = json.dumps({"messages": messages}, indent=1)
        path = _path(name)
        try:
            with path.open("x", encoding="ascii") as file:
                file.write(text)
        except FileExistsError:
            raise Refused(f"{path}: there is such a file; give another name") from None
        except OSError as error:
            raise Refused(f"{path}: {error.strerror}") from error
        return f"{len(messages)} messages in {path}"

    def load(self, name: str) -> str:
        """Go on with a file's conversation; returns what there is to say. Raises Refused."""
        path = _path(name)
        try:
            found = json.loads(read_bounded(path, _MAX_BYTES))
            messages = [(one["role"], one["content"]) for one in found["messages"]]
        except OSError as error:
            raise Refused(f"{path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Refused(f'{path}: is not {{"messages": [{{"role": ..., "content": ...}}, ...]}}') from None
        system, turns = _checked(messages, path)
        self.system, self.turns = system, turns
        return f"{len(messages)} messages from {path}"


def _path(name: str) -> Path:
    """Raises Refused for what can't be a path."""
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:  # ~ of nobody
        raise Refused(f"{name}: {error}") from error
    if "\0" in name:
        raise Refused("a path has no NUL")
    return path


def _checked(messages: Sequence[tuple[object, object]], path: Path) -> tuple[str, list[Message]]:
    """The system message and the turns. Raises Refused where they are not in turn."""
    turns = []
    for role, content in messages:
        if role not in _ROLES or not isinstance(content, str):
            raise Refused(f"{path}: a message is a text by system, user or assistant")
        turns.append(Message(str(role), content))
    system = turns.pop(0).content if turns and turns[0].role == "system" else ""
    if any(turn.role != _ROLES[1 + number % 2] for number, turn in enumerate(turns)) or len(turns) % 2:
        raise Refused(f"{path}: user and assistant are not in turn, or the last question has no answer")
    return system, turns


def command_of(line: str) -> tuple[str, str] | None:
    """The command and its argument, if it is one: questions may begin with a path.

    A word of letters after a slash is one, and with an argument only if it is in COMMANDS.
    """
    found = _COMMAND.fullmatch(line.strip())
    if found is None or (found[2] and found[1] not in COMMANDS):
        return None
    return found[1], (found[2] or "").strip()
