"""Tokens as bytes, read from a byte-level BPE's tokenizer.json."""

from __future__ import annotations

import json


class ByteVocabulary:
    """Both ways: tokens to text, and text to tokens of one byte each."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Raises ValueError where tokens are no bytes."""
        tokenizer = json.loads(tokenizer_json)
        if "ByteLevel" not in json.dumps(tokenizer.get("decoder")):
            raise ValueError("the tokens of this model are no bytes")
        byte_of = {character: byte for byte, character in _characters().items()}
        special = {item["id"] for item in tokenizer.get("added_tokens") or () if item["special"]}
        self._bytes = {
            token: bytes(byte_of[character] for character in text)
            for text, token in tokenizer["model"]["vocab"].items()
            if token not in special and all(character in byte_of for character in text)
        }
        self._tokens = {data: token for token, data in self._bytes.items() if len(data) == 1}

    def text(self, tokens: list[int]) -> str:
        """The text of tokens; special ones have none."""
        return b"".join(self._bytes.get(token, b"") for token in tokens).decode(errors="replace")

    def tokens(self, text: str) -> list[int]:
        """A text, byte by byte."""
        return [self._tokens[bytes([byte])] for byte in text.encode()]


def _characters() -> dict[int, str]:
    """The character that stands for each byte (GPT-2's mapping)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
