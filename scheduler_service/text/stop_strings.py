"""Stop strings: the first one to be completed ends the text, however the text was split.

One automaton searches for all stop strings at once (Aho and Corasick 1975). Its state is the longest suffix
of the text so far that is a prefix of a stop string. The state's depth is the length of that suffix, which
is exactly the text that has to be held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """The stop strings of one request, compiled; shared by its completions. Strings are not empty."""

    def __init__(self, strings: Iterable[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.fallback: list[int] = [0]  # the longest proper suffix that is a state too
        self.depth: list[int] = [0]
        self.match: list[str | None] = [None]  # the longest stop string that ends in this state
        for string in strings:
            self._insert(string)
        self._set_fallbacks()

    def _insert(self, string: str) -> None:
        state = 0
        for character in string:
            following = self.children[state].get(character)
            if following is None:
                following = len(self.children)
                self.children[state][character] = following
                self.children.append({})
                self.fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = following
        self.match[state] = string

    def _set_fallbacks(self) -> None:
        """Set the fallback of every state, and let a state inherit its fallback's match. Call it once."""
        queue = deque(self.children[0].values())  # breadth first: fallbacks are shallower, so complete
        while queue:
            state = queue.popleft()
            self.match[state] = self.match[state] or self.match[self.fallback[state]]
            for character, child in self.children[state].items():
                self.fallback[child] = self.step(self.fallback[state], character)
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        children = self.children
        while state and character not in children[state]:
            state = self.fallback[state]
        return children[state].get(character, 0)


class StopMatcher:
    """Splits one completion's text into what may be sent and what may still become a stop string.

    The match is the stop string that is completed first; of several completed by one character, the longest.
    """

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; returns the text that may be sent, and the stop string if one was completed.

        The stop string is no part of the text. Nothing may be pushed after a match.
        """
        strings, state = self._strings, self._state
        match = strings.match
        for position, character in enumerate(text):
            state = strings.step(state, character)
            found = match[state]
            if found is not None:
                whole = self._held + text[: position + 1]
                self._held = ""
                return whole[: -len(found)], found
        whole = self._held + text
        out = len(whole) - strings.depth[state]
        self._state, self._held = state, whole[out:]
        return whole[:out], None

    def flush(self) -> str:
        """The text that was held back, when no more text follows."""
        held, self._held, self._state = self._held, "", 0
        return held
