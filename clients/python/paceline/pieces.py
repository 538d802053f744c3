"""GetTokenizer's stream of pieces, joined to one message again, for both services."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from paceline.errors import InternalError

MAX_TOKENIZER_BYTES = 256 << 20
"""More than any real tokenizer.json, and little enough to receive."""


class _Piece(Protocol):
    tokenizer_json: bytes


P = TypeVar("P", bound=_Piece)


class Pieces(Generic[P]):
    """Takes the messages of one call: the first has all fields, the others more of tokenizer_json."""

    def __init__(self) -> None:
        self._first: P | None = None
        self._json: list[bytes] = []
        self._bytes = 0

    def add(self, piece: P) -> None:
        """Take the next message. Raises InternalError if they become too many."""
        self._first = self._first or piece
        self._json.append(piece.tokenizer_json)
        self._bytes += len(piece.tokenizer_json)
        if self._bytes > MAX_TOKENIZER_BYTES:
            raise InternalError(f"the tokenizer has more than {MAX_TOKENIZER_BYTES >> 20} MiB")

    def joined(self) -> P:
        """The whole message. Raises InternalError if none came."""
        if self._first is None:
            raise InternalError("the tokenizer's stream ended without a message")
        self._first.tokenizer_json = b"".join(self._json)
        return self._first
