"""`Escapes`: in JSON texts every character is written in one way, and only control characters are escaped.

Of a key that a schema does not name, the library demands that it differs from the names as text. So
`"\\u0061"` passes beside a property `a`, and is the same key. Such escapes are kept out: `\\u` is allowed
for control characters alone, in lower-case digits, and not for those that have a shorter escape. No value of
a schema is lost by that, only ways of writing it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from executor_service.contract.masks import Masks

OUTSIDE = 0
"""The state in front of a text, and wherever no escape is open."""

_DIGITS = b"0123456789abcdef"
_BACKSLASH, _U, _U0, _U00, _U000, _U001, _U007 = range(1, 8)
_MOVES: dict[int, dict[int, int]] = {
    _U: {ord("0"): _U0},
    _U0: {ord("0"): _U00},
    _U00: {ord("0"): _U000, ord("1"): _U001, ord("7"): _U007},
    _U000: dict.fromkeys(b"01234567bef", OUTSIDE),  # 8, 9, a, c, d are \b, \t, \n, \f, \r
    _U001: dict.fromkeys(_DIGITS, OUTSIDE),
    _U007: {ord("f"): OUTSIDE},
}
_STATES = 1 + _U007
_STARTS = frozenset(b"u" + _DIGITS)
"""What a token without a backslash begins with, if it matters how an escape goes on with it."""


class Escapes:
    """An automaton over the tokens of one vocabulary; its states are small numbers."""

    def __init__(self, tokens: Sequence[bytes], mask_bytes: int) -> None:
        """`tokens`: the text of each token id. `mask_bytes`: of one mask, as in `contract.masks`."""
        bits = np.ones((_STATES, 8 * mask_bytes), np.uint8)
        bits[_U:] = 0
        self._after: dict[tuple[int, int], int] = {}
        for token, text in enumerate(tokens):
            if text and b"\\" not in text and text[0] not in _STARTS:
                continue  # allowed after a backslash and where no escape is open, and none is open after it
            for state in range(_STATES):
                after = _read(state, text)
                bits[state, token] = after is not None
                if after:
                    self._after[state, token] = after
        self.masks: Masks = np.packbits(bits, axis=1, bitorder="little")
        """The tokens allowed in each state, [states, `mask_bytes`]."""

    def follow(self, state: int, tokens: Sequence[int]) -> list[int]:
        """The states after each of these tokens, up to the first that is not allowed."""
        states: list[int] = []
        for token in tokens:
            if not self.masks[state, token >> 3] >> (token & 7) & 1:
                break
            state = self._after.get((state, token), OUTSIDE)
            states.append(state)
        return states


def _read(state: int, text: bytes) -> int | None:
    """The state after a text; None: it is not allowed."""
    for byte in text:
        if state == OUTSIDE:
            state = _BACKSLASH if byte == ord("\\") else OUTSIDE
        elif state == _BACKSLASH:
            state = _U if byte == ord("u") else OUTSIDE
        else:
            after = _MOVES[state].get(byte)
            if after is None:
                return None
            state = after
    return state
