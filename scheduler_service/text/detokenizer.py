"""Token ids to text, incrementally: only an unfinished UTF-8 character is held back.

Each token stands for the same bytes whatever tokens surround it. The text is these bytes decoded as UTF-8,
with U+FFFD for invalid ones, so any split of the ids gives the same text. For byte-level BPE the result is
exactly that of `decode` in the `tokenizers` library. For byte fallback (sentencepiece) it is the same on
valid UTF-8; next to an invalid byte the library also replaces valid characters, which a stream may already
have sent.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from scheduler_service.text.vocabulary import Vocabulary


class Detokenizer:
    """Decodes the ids of one completion."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._bytes_of = vocabulary.__getitem__
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._strip = vocabulary.strip

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids; returns the text that they complete."""
        text = self._decode(b"".join(map(self._bytes_of, ids)))
        return self._stripped(text) if self._strip and text else text

    def flush(self) -> str:
        """Text of an unfinished character (U+FFFD), when no more ids follow; usually empty."""
        return self._stripped(self._decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        spaces = len(text) - len(text.lstrip(" "))
        taken = min(spaces, self._strip)
        self._strip = self._strip - taken if taken == len(text) else 0
        return text[taken:]
