"""Sends the chats of one long system prompt to as few stacks as their share of all chats needs.

The client's own affinity key ends with a chat's first question, so that every stack computes every system
prompt; where the pages of a stack do not hold them all, it does so again and again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_MIN_CHARACTERS = 512  # of a system prompt: less is soon computed
_FEWEST, _MOST = 128, 2048
"""Chats: shares are of so many at least; at so many, counts are halved and rare prompts dropped."""
_KEYS = 8
"""Keys for as many chats as one stack gets: with fewer, stacks would get less equal shares."""
_CHANGED = 0.75
"""The number changes once it is so far off: a chat whose key changes leaves its turns' pages behind."""


class Beginnings:
    """Counts the chats of one process by their system prompts."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()
        self._keys: dict[bytes, int] = {}  # how many each has

    def affinity_key(self, turns: Sequence[Mapping[str, Any]], stacks: int, *scope: str) -> str:
        """The SDK's option for a chat; "": the client's own. `scope`: what else cached prompts depend on."""
        asked = next((place for place, turn in enumerate(turns) if turn["role"] == "user"), len(turns))
        system, question = turns[:asked], turns[asked : asked + 1]
        if stacks < 2 or sum(len(turn.get("content", "")) for turn in system) < _MIN_CHARACTERS:
            return ""
        prompt = _digest(scope, system)
        self._counts[prompt] += 1
        total = self._counts.total()
        wanted = _KEYS * stacks * self._counts[prompt] / max(total, _FEWEST)
        keys = self._keys.setdefault(prompt, 1)
        if abs(wanted - keys) > _CHANGED:
            keys = self._keys[prompt] = max(1, round(wanted))
        if total >= _MOST:
            self._counts = Counter({key: count // 2 for key, count in self._counts.items() if count > 1})
            self._keys = {key: self._keys[key] for key in self._counts}
        if keys >= _KEYS:  # more than one stack's share
            return ""
        # By weights: with one key more, few chats change theirs.
        number = max(range(keys), key=lambda one: _digest(one, question))
        return f"{prompt.hex()} {number}"


def _digest(*values: Any) -> bytes:
    return hashlib.sha256(json.dumps(values).encode()).digest()
