"""Joins what a client gets in pieces: the tokenizer of both services, and the vocabulary."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from paceline.errors import InternalError
from paceline.scheduler.v1 import scheduler_pb2 as pb

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


class Vocabulary:
    """Collects the replies of GetVocabulary. Each call asks from `len(tokens)` on."""

    def __init__(self) -> None:
        self.tokens: list[bytes] = []
        self.is_complete = False
        self._fingerprint = b""
        self._bytes = 0

    def add(self, reply: pb.GetVocabularyResponse) -> None:
        """Add the next reply; another vocabulary than the one before begins anew.

        Raises InternalError for a reply that doesn't go on where the last one ended, and beyond
        MAX_TOKENIZER_BYTES.
        """
        if reply.fingerprint != self._fingerprint and self.tokens:
            self.tokens, self._bytes, self._fingerprint = [], 0, b""
            return
        self._fingerprint = reply.fingerprint
        self.tokens += reply.tokens
        self._bytes += sum(map(len, reply.tokens)) + len(reply.tokens)
        if reply.next_id not in (0, len(self.tokens)) or (reply.next_id and not reply.tokens):
            raise InternalError(
                f"the vocabulary goes on with token {reply.next_id}, and {len(self.tokens)} are here"
            )
        if self._bytes > MAX_TOKENIZER_BYTES:
            raise InternalError(f"the vocabulary has more than {MAX_TOKENIZER_BYTES >> 20} MiB")
        self.is_complete = reply.next_id == 0
