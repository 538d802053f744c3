"""The bytes of each token id of a tokenizer, derived from its decoder."""

from __future__ import annotations

import json
import re
from array import array

from tokenizers import Tokenizer

from scheduler_service.text.vocabulary import TokenBytes

MAX_BYTES = 64 << 20
"""Bytes of all tokens together; a published vocabulary of 262,144 tokens has 2 MiB."""
MAX_IDS = 1 << 22
"""Number of ids, from 0, whose bytes are read; the others have none."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedTokenizerError(Exception):
    """The decoder can't be applied token by token, or the tokens have too many bytes; the message tells."""


def pieces_of(tokenizer: Tokenizer) -> TokenBytes:
    """The bytes of all tokens of a tokenizer, by id. Special tokens and ids without a token have none.

    Raises UnsupportedTokenizerError.
    """
    decoder = _Decoder(tokenizer)
    ids = {*tokenizer.get_vocab(with_added_tokens=True).values(), *tokenizer.get_added_tokens_decoder()}
    last = max((id_ for id_ in ids if id_ < MAX_IDS), default=-1)  # below it there may be ids without a token
    data: list[bytes] = []
    total = 0
    for id_ in range(last + 1):
        token = tokenizer.id_to_token(id_)
        piece = b"" if token is None else decoder.piece(id_, token)
        data.append(piece)
        total += len(piece)
        if total > MAX_BYTES:
            raise UnsupportedTokenizerError(f"its tokens have more than {MAX_BYTES} bytes")
    return TokenBytes(b"".join(data), array("I", map(len, data)), decoder.strip, decoder.special)


class _Decoder:
    """A tokenizer's decoder, applied to single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().items()
        self.special = {id_: token.content for id_, token in added if token.special}
        """Texts of the special tokens, by id."""
        steps = _decoder_steps(tokenizer)
        kinds = [step["type"] for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in kinds
        self._separator = b"" if kinds else b" "  # without a decoder, tokens are joined by spaces
        self._replacements: list[tuple[str, str]] = []
        self.strip = 0 if kinds else 1
        """Number of spaces to remove from the beginning of a text."""
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

    def piece(self, id_: int, token: str) -> bytes:
        """The bytes of a token."""
        if id_ in self.special:
            return b""
        if self._byte_level:
            try:
                return bytes([_BYTE_OF[character] for character in token])
            except KeyError:  # an added token, which is not byte-encoded
                return token.encode()
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return self._separator + token.encode()


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, object]]:
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps: list[dict[str, object]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def _byte_alphabet() -> dict[str, int]:
    """Byte by character, for the printable characters by which GPT-2 writes bytes (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    alphabet |= {chr(256 + rank): byte for rank, byte in enumerate(list(others))}
    return alphabet


_BYTE_OF = _byte_alphabet()
