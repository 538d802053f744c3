"""Token ids to text, incrementally: only an unfinished UTF-8 character is held back.

A token stands for bytes, whatever its neighbours are; the text is those bytes read as UTF-8, with
U+FFFD for what is invalid. So any split of the ids gives the same text. For byte-level BPE this is
the `tokenizers` library's own decode, to the letter. For byte fallback (sentencepiece) it equals it
on valid UTF-8; around an invalid byte the library would also take back the valid characters
beside it, which a stream can't do.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedTokenizerError(Exception):
    """The tokenizer's decoder is none of those we can run incrementally; the message names it."""


class Vocabulary(dict[int, bytes]):
    """The bytes that each token id stands for, found when first asked for; specials are empty."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._id_to_token = tokenizer.id_to_token
        self._special = frozenset(
            id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        steps = _decoder_steps(json.loads(tokenizer.to_str())["decoder"])
        kinds = [step["type"] for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in kinds
        self._separator = b"" if kinds else b" "  # without a decoder, tokens are joined by spaces
        self._replacements: list[tuple[str, str]] = []
        self.strip = 0 if kinds else 1
        """Spaces to take from the beginning of a text."""
        for step in steps:
            self._learn(step)

    def _learn(self, step: dict[str, object]) -> None:
        match step:
            case {"type": "ByteLevel"} if self._byte_level:
                pass
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replacements.append((old, new))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                self.strip = start
            case {"type": "Metaspace", "replacement": str(old), **rest}:
                self._replacements.append((old, " "))
                self.strip = 0 if rest.get("prepend_scheme") == "never" else 1
            case _:
                raise UnsupportedTokenizerError(f"the decoder step {json.dumps(step)} is not supported")

    def __missing__(self, id_: int) -> bytes:
        piece = self._piece(id_)
        self[id_] = piece
        return piece

    def _piece(self, id_: int) -> bytes:
        token = None if id_ in self._special else self._id_to_token(id_)
        if token is None:  # special, or an id by which a model's vocabulary was padded
            return b""
        if self._byte_level:
            try:
                return bytes([_BYTE_OF[character] for character in token])
            except KeyError:  # an added token, kept as it is
                return token.encode()
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return self._separator + token.encode()


class Detokenizer:
    """One completion's ids on their way to text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._strip = vocabulary.strip

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        vocabulary = self._vocabulary
        text = self._decode(b"".join([vocabulary[id_] for id_ in ids]))
        return self._stripped(text) if self._strip and text else text

    def flush(self) -> str:
        """What an unfinished character leaves, now that nothing follows."""
        return self._stripped(self._decode(b"", True))

    def _stripped(self, text: str) -> str:
        spaces = len(text) - len(text.lstrip(" "))
        taken = min(spaces, self._strip)
        self._strip = self._strip - taken if taken == len(text) else 0
        return text[taken:]


def _decoder_steps(decoder: dict[str, object] | None) -> list[dict[str, object]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        inner = decoder["decoders"]
        assert isinstance(inner, list)
        return inner
    return [decoder]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019), reversed."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    alphabet |= {chr(256 + rank): byte for rank, byte in enumerate(list(others))}
    return alphabet


_BYTE_OF = _byte_alphabet()
