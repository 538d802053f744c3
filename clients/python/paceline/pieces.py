"""Joins the streamed messages of GetTokenizer, of both services, into one message."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from paceline.errors import InternalError

MAX_TOKENIZER_BYTES = 256 << 20
"""Bounds the memory of a reply; larger than any known tokenizer.json."""


class _Piece(Protocol):
    tokenizer_json: bytes


P = TypeVar("P", bound=_Piece)


class Pieces(Generic[P]):
    """Collects the messages of one call.

    The first message has all fields and the start of tokenizer_json; each other message continues
    tokenizer_json.
    """

    def __init__(self) -> None:
        self._first: P | None = None
        self._json: list[bytes] = []
        self._bytes = 0

    def add(self, piece: P) -> None:
        """Add the next message. Raises InternalError if the tokenizer exceeds MAX_TOKENIZER_BYTES."""
        self._first = self._first or piece
        self._json.append(piece.tokenizer_json)
        self._bytes += len(piece.tokenizer_json)
        if self._bytes > MAX_TOKENIZER_BYTES:
            raise InternalError(f"the tokenizer has more than {MAX_TOKENIZER_BYTES >> 20} MiB")

    def joined(self) -> P:
        """The first message with the whole tokenizer_json. Raises InternalError if none was added."""
        if self._first is None:
            raise InternalError("the tokenizer's stream ended without a message")
        self._first.tokenizer_json = b"".join(self._json)
        return self._first
