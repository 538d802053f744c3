"""Token ids to text, incrementally: only an unfinished UTF-8 character is held back.

A token stands for bytes, whatever its neighbours are; the text is those bytes read as UTF-8, with
U+FFFD for what is invalid. So any split of the ids gives the same text. For byte-level BPE this is
the `tokenizers` library's own decode, to the letter. For byte fallback (sentencepiece) it equals it
on valid UTF-8; around an invalid byte the library would also take back the valid characters
beside it, which a stream can't do.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from scheduler_service.text.vocabulary import Vocabulary


class Detokenizer:
    """One completion's ids on their way to text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._bytes_of = vocabulary.__getitem__
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._strip = vocabulary.strip

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        text = self._decode(b"".join(map(self._bytes_of, ids)))
        return self._stripped(text) if self._strip and text else text

    def flush(self) -> str:
        """What an unfinished character leaves, now that nothing follows."""
        return self._stripped(self._decode(b"", True))

    def _stripped(self, text: str) -> str:
        spaces = len(text) - len(text.lstrip(" "))
        taken = min(spaces, self._strip)
        self._strip = self._strip - taken if taken == len(text) else 0
        return text[taken:]
