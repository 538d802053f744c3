"""Escapes are read alike however a text is cut into tokens."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from executor_service.contract.masks import mask_bytes
from executor_service.grammar.escapes import OUTSIDE, Escapes

PIECES = [
    b"",
    b"\\",
    b"u",
    b"0",
    b"1",
    b"f",
    b"7",
    b"a",
    b"x",
    b"00",
    b"\\u",
    b"\\u00",
    b"u0",
    b"0a",
    b"0b",
    b'"',
]
PIECES += [b"\\n\\", b"\\\\", b"\\u001f", b"1f\\u", b"61", b"F", b"8", b"e9", b"d83d"]
ESCAPES = Escapes(PIECES, mask_bytes(len(PIECES)))
ALLOWED = re.compile(rb"(?:[^\\]|\\[^u]|\\u(?:000[0-7bef]|001[0-9a-f]|007f))*")
UNFINISHED = re.compile(rb"\\(?:u(?:0(?:0(?:0|1|7)?)?)?)?")


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=12))
@example([10, 9, 13])
@example([1, 0, 2])  # a token without text changes nothing
@example([10, 0, 9])
def test_tokens_are_allowed_as_far_as_their_text_can_go_on(tokens: list[int]) -> None:
    states = ESCAPES.follow(OUTSIDE, tokens)
    text = b"".join(PIECES[token] for token in tokens[: len(states)])
    whole = ALLOWED.match(text)
    assert whole is not None
    rest = text[whole.end() :]
    assert not rest or UNFINISHED.fullmatch(rest)
    if len(states) < len(tokens):
        longer = text + PIECES[tokens[len(states)]]
        whole = ALLOWED.match(longer)
        assert whole is not None
        assert not UNFINISHED.fullmatch(longer[whole.end() :])
        assert whole.end() < len(longer)
    if states:
        assert (states[-1] == OUTSIDE) == (not rest)
