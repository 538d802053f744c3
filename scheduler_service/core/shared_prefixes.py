"""Which of several prompts wait for which other one, so that a prefix they share is computed once."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

MIN_SHARED_TOKENS = 32
"""A shorter common prefix is not waited for; and no other prompt is, for so few tokens more."""
ID_BYTES = 4
"""Of a token's id in a prompt that is compared."""


class Shared(NamedTuple):
    """The prefix that a prompt has in common with its leader."""

    leader: int  # index among the prompts
    tokens: int  # that may come from the prefix cache


def leaders(prompts: Sequence[bytes], usable: Sequence[int]) -> list[Shared | None]:
    """For each prompt, the one that it waits for, its *leader*; None: it waits for none.

    prompts: token ids of 4 bytes each. usable[i]: how many first tokens of prompt i may come from the prefix
    cache. A leader is no longer than those that wait for it, and at least half of it is their common prefix:
    so waiting takes less time than it saves. A leader may have a leader itself, and there is no cycle.
    """
    found: list[Shared | None] = [None] * len(prompts)
    ordered: list[tuple[bytes, int]] = []  # shorter prompts; the longest common prefix is a neighbour's
    for index in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
        prompt = prompts[index]
        at = bisect_left(ordered, (prompt, index))
        best, leader = 0, -1
        for _, other in ordered[max(0, at - 1) : at + 1]:
            tokens = min(common(prompt, prompts[other]), usable[index])
            if tokens > best:
                best, leader = tokens, other
        # A leader that waits itself is passed over for its own one, unless it has much more in common.
        while leader >= 0 and (above := found[leader]) is not None:
            if above.tokens < best - MIN_SHARED_TOKENS:
                break
            best, leader = min(best, above.tokens), above.leader
        if best >= MIN_SHARED_TOKENS and 2 * best * ID_BYTES >= len(prompts[leader]):
            found[index] = Shared(leader, best)
        insort(ordered, (prompt, index))
    return found


def common(one: bytes, other: bytes) -> int:
    """Number of first tokens that two prompts, of 4 bytes a token, have in common."""
    low, high = 0, min(len(one), len(other)) // ID_BYTES
    while low < high:  # slices are compared at the speed of memory
        middle = (low + high + 1) // 2
        if one[low * ID_BYTES : middle * ID_BYTES] == other[low * ID_BYTES : middle * ID_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
