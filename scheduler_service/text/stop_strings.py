"""Where generated text ends: the first stop string to be completed, however the text was cut.

All stop strings are looked for at once by one automaton (Aho and Corasick 1975). Its state is the
longest end of the text so far that could still grow into a stop string, so the state's depth is
exactly what has to be held back: no more, no less.
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
        self._link()

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

    def _link(self) -> None:
        queue = deque(self.children[0].values())  # breadth first: fallbacks are shallower, so linked
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
    """One completion's text on its way out: what can't be part of a stop string any more.

    The match is the stop string that is complete first; of several that end together, the longest.
    """

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may go out, and the stop string if one was completed (then push no more)."""
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
        """What was held back, now that nothing follows."""
        held, self._held, self._state = self._held, "", 0
        return held
