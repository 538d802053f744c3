"""`PathPattern`: a regular expression of PEFT for the paths of linear layers.

The files are untrusted, and Python's `re` can take for ever on a hostile expression. So only what describes
paths is taken: names, dots, classes, alternatives, and a few repetitions of single characters.
"""

from __future__ import annotations

import re

_MAX_LENGTH = 256
_MAX_REPETITIONS = 2  # a path has some 40 characters: at most that to this power of ways to match
_CLASS = r"\[\^?[\w.-]+\]"
_TOKENS = re.compile(rf"(?P<one>\\[dw.]|[.]|{_CLASS}|[\w-])(?P<times>[*+]\??)?|\((?:\?:)?|[)|^$]", re.ASCII)


class PathPattern:
    """A checked expression."""

    def __init__(self, text: str) -> None:
        """Raises ValueError, which says why it is not taken."""
        if len(text) > _MAX_LENGTH:
            raise ValueError(f"a pattern of {len(text)} characters, at most {_MAX_LENGTH} are read")
        at = repetitions = 0
        while at < len(text):
            found = _TOKENS.match(text, at)
            if found is None:
                raise ValueError(f"the pattern {text[:80]!r} has more than names, classes and alternatives")
            repetitions += found["times"] is not None
            at = found.end()
        if repetitions > _MAX_REPETITIONS:
            raise ValueError(f"the pattern {text[:80]!r} has more than {_MAX_REPETITIONS} repetitions")
        try:
            self._end = re.compile(rf"(.*\.)?({text})$")
            self._whole = re.compile(text)
        except re.error as error:
            raise ValueError(f"the pattern {text[:80]!r}: {error}") from None

    def ends(self, path: str) -> bool:
        """Whether a path ends so, from its beginning or after a dot: as PEFT reads keys of its patterns."""
        return self._end.match(path) is not None

    def is_all_of(self, path: str) -> bool:
        """Whether it matches all of a path."""
        return self._whole.fullmatch(path) is not None
