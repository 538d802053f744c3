"""Sends the chats of one long system prompt to as few stacks as their share of all chats needs.

The client's own affinity key ends with a chat's first question, so that every stack computes every system
prompt; where the pages of a stack do not hold them all, it does so again and again. Keys of system prompts
are few, so that chance would give some stacks many more of them than others: a key is chosen whose stack has
no more of them than the mean.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.affinity import own_key, preference

EXTRA_STREAMS = 3
"""Of the gateway's client: with fewer, of 8 chats at once at two stacks one in eight leaves its prompt."""

_MIN_CHARACTERS = 512  # of a system prompt: less is soon computed
_FEWEST, _MOST = 128, 2048
"""Chats: the fewest that have shares; the number at which counts are halved and rare prompts dropped."""
_KEYS = 8
"""Keys for as many chats as one stack gets: with fewer, stacks would get less equal shares."""
_CHANGED = 0.75
"""The number changes once it is so far off: a chat whose key changes leaves its turns' pages behind."""
_TRIES = 8
"""Keys of which one is chosen: of half of the stacks, on average, one is no fuller than the mean."""


class Beginnings:
    """Counts the chats of one process by their system prompts, and remembers where their keys lead.

    Another process has the same first key of a prompt, and differs in those that it had to choose otherwise.
    """

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()
        self._total = 0  # chats counted
        self._keys: dict[bytes, int] = {}  # how many each has
        self._chosen: OrderedDict[str, tuple[str, str]] = OrderedDict()  # key and stack, the last used last
        self._at: Counter[str] = Counter()  # keys, by stack

    def affinity_key(self, turns: Sequence[Mapping[str, Any]], stacks: Sequence[str], *scope: str) -> str:
        """The SDK's option for a chat; "": the client's own. `scope`: what else cached prompts depend on.

        `stacks`: their addresses.
        """
        asked = next((place for place, turn in enumerate(turns) if turn["role"] == "user"), len(turns))
        system, question = turns[:asked], turns[asked : asked + 1]
        if len(stacks) < 2 or sum(len(turn.get("content", "")) for turn in system) < _MIN_CHARACTERS:
            return ""
        prompt = _digest(scope, system)
        keys = self._number(prompt, len(stacks))
        if keys >= _KEYS:  # more than one stack's share
            return ""
        # By weights: with one key more, few chats change theirs.
        number = max(range(keys), key=lambda one: _digest(one, question))
        return self._balanced(f"{prompt.hex()} {number}", stacks)

    def _number(self, prompt: bytes, stacks: int) -> int:
        """Count a chat; the number of its prompt's keys."""
        self._counts[prompt] += 1
        self._total += 1
        wanted = _KEYS * stacks * self._counts[prompt] / max(self._total, _FEWEST)
        keys = self._keys.setdefault(prompt, 1)
        if abs(wanted - keys) > _CHANGED:
            keys = self._keys[prompt] = max(1, round(wanted))
        if self._total >= _MOST:
            self._counts = Counter({key: count // 2 for key, count in self._counts.items() if count > 1})
            self._total = self._counts.total()
            self._keys = {key: self._keys[key] for key in self._counts}
        return keys

    def _balanced(self, name: str, stacks: Sequence[str]) -> str:
        """The key of this name; chosen when it is new, of a stack that has no more keys than the mean."""
        if name in self._chosen:
            key = self._forget(name)
            stack = _first(key, stacks)  # another one, if that one is gone
        else:
            for attempt in range(_TRIES):
                key = f"{name} {attempt}"
                stack = _first(key, stacks)
                if self._at[stack] * len(stacks) <= len(self._chosen):
                    break
        self._chosen[name] = key, stack
        self._at[stack] += 1
        if len(self._chosen) > _MOST:
            self._forget(next(iter(self._chosen)))
        return key

    def _forget(self, name: str) -> str:
        key, stack = self._chosen.pop(name)
        self._at[stack] -= 1
        if not self._at[stack]:
            del self._at[stack]
        return key


def _first(key: str, stacks: Sequence[str]) -> str:
    """The stack that the key prefers."""
    return preference(own_key(key), stacks)[0]


def _digest(*values: Any) -> bytes:
    return hashlib.sha256(json.dumps(values).encode()).digest()
