"""`Script`: the answers of the scripted oracle, read from a file of JSON lines.

Each line is an object with `text`, the answer, and one of

    prompt    the whole prompt, as the model gets it: of a chat, after the chat template
    message   the content of the last message of a chat
    pattern   a regular expression that matches somewhere in the prompt (Python's `re.search`)

The first line that fits a prompt answers it. Empty lines, and lines that begin with #, are skipped.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from executor_service.backends.base import ModelError

_MAX_SHOWN = 80  # characters of a prompt in an error message


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """One line of a script: which prompts it answers, and the UTF-8 of the answer."""

    line: int
    fits: Callable[[str], object]
    text: bytes


class Script:
    """The answers of one file, in its order."""

    def __init__(self, name: str, content: str) -> None:
        """`name` is the file's name, for messages. Raises ModelError, which names the line at fault."""
        self.name, self.content = name, content
        self._answers = list(_answers(name, content))
        if not self._answers:
            raise ModelError(f"--script {name}: there are no answers in it")
        self.find = functools.lru_cache(maxsize=1024)(self._find)

    @classmethod
    def read(cls, path: Path) -> Script:
        """The script in a file. Raises ModelError."""
        try:
            return cls(str(path), path.read_text("utf-8"))
        except OSError as error:
            raise ModelError(f"--script {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ModelError(f"--script {path}: byte {error.start} is not UTF-8") from error

    def no_answer(self, prompt: str) -> str:
        """What is said of a prompt that no line fits."""
        shown = prompt if len(prompt) <= _MAX_SHOWN else f"...{prompt[-_MAX_SHOWN:]}"
        return f"the script {self.name} has no answer for the prompt {shown!r}"

    def _find(self, prompt: str) -> ScriptedAnswer | None:
        return next((answer for answer in self._answers if answer.fits(prompt)), None)


def _answers(name: str, content: str) -> Iterator[ScriptedAnswer]:
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            yield _answer(number, line)
        except ValueError as error:
            raise ModelError(f"--script {name}:{number}: {error}") from error


def _answer(number: int, line: str) -> ScriptedAnswer:
    """The answer in one line. Raises ValueError."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise ValueError("expected an object of strings")
    text = entry.pop("text", None)
    if text is None or len(entry) != 1 or not entry.keys() <= _CONDITIONS.keys():
        raise ValueError(f"expected `text` and one of {', '.join(_CONDITIONS)}")
    ((kind, value),) = entry.items()
    try:
        return ScriptedAnswer(number, _CONDITIONS[kind](value), text.encode())
    except re.error as error:
        raise ValueError(f"the pattern is not a regular expression: {error}") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not Unicode: {error.reason}") from error


def _is_prompt(value: str) -> Callable[[str], object]:
    return value.__eq__


def _is_last_message(value: str) -> Callable[[str], object]:
    # The chat template writes one line for each message, and ends with the answer's role.
    return re.compile(rf"(?:\A|\n)[\w-]+: {re.escape(value)}\nassistant: \Z").search


def _matches(value: str) -> Callable[[str], object]:
    return re.compile(value).search


_CONDITIONS: Mapping[str, Callable[[str], Callable[[str], object]]] = {
    "prompt": _is_prompt,
    "message": _is_last_message,
    "pattern": _matches,
}
