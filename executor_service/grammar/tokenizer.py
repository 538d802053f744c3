"""`engine_tokenizer`: what the grammar engine takes of a model's tokenizer.json.

The engine reads the tokens from it, and tokenizes with it what a grammar forces: in the executor, at every
step. The file is a stranger's, and the library that tokenizes has no bounds. So what may take unlimited time
or memory is looked for before that library sees the file, and what adds tokens to a text is left out.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLTokenizer

_MAX_ADDED_TOKENS = 32_768
"""The library compares each with all others: this many take 10 s, twice as many a minute."""
_MAX_TOKEN_BYTES = 8 << 20
"""Of all tokens together; a vocabulary of 262,144 has 2 MiB."""
_MAX_GROWTH = 256
"""By which normalizers may lengthen a text; Llama's make 3 bytes of a space, NFKC 33 of one letter."""
_ADDS_TOKENS = ("truncation", "padding", "post_processor")
# How many bytes one byte becomes at most.
_GROWTH: Mapping[str, int] = {
    "BertNormalizer": 5,
    "ByteLevel": 2,
    "Lowercase": 2,
    "NFC": 3,
    "NFD": 4,
    "NFKC": 11,
    "NFKD": 11,
    "Nmt": 1,
    "Strip": 1,
    "StripAccents": 1,
}


class TokenizerUnsupported(Exception):
    """Grammars can't be compiled for this tokenizer."""


def engine_tokenizer(tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The library's tokenizer. Raises TokenizerUnsupported."""
    try:
        text = _bounded(json.loads(tokenizer_json))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise TokenizerUnsupported(f"tokenizer.json: {type(error).__name__}: {error}") from None
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise TokenizerUnsupported(str(error)) from None


def _bounded(tokenizer: Mapping[str, Any]) -> str:
    """The file without what adds tokens to a text. Raises TokenizerUnsupported for what exceeds a bound."""
    added = tokenizer.get("added_tokens") or ()
    if len(added) > _MAX_ADDED_TOKENS:
        raise TokenizerUnsupported(
            f"added_tokens: {len(added)} tokens, at most {_MAX_ADDED_TOKENS} are read for grammars"
        )
    vocabulary = tokenizer["model"]["vocab"]
    texts = vocabulary if isinstance(vocabulary, dict) else (token for token, _ in vocabulary)
    size = sum(map(len, texts)) + sum(len(token["content"]) for token in added)
    if size > _MAX_TOKEN_BYTES:
        raise TokenizerUnsupported(
            f"the tokens have {size} characters, at most {_MAX_TOKEN_BYTES} are read for grammars"
        )
    growth = _growth(tokenizer.get("normalizer"))
    if growth > _MAX_GROWTH:
        raise TokenizerUnsupported(
            f"normalizer: it may lengthen a text {growth:.3g} times, more than {_MAX_GROWTH} times"
        )
    return json.dumps({**tokenizer, **dict.fromkeys(_ADDS_TOKENS)})


def _growth(normalizer: Mapping[str, Any] | None) -> float:
    """How many bytes a normalizer makes of one byte at most."""
    match normalizer:
        case None:
            return 1
        case {"type": "Sequence", "normalizers": [*steps]}:
            growth = 1.0
            for step in steps:
                growth *= _growth(step)
            return growth
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if pattern:
            return max(1, len(content.encode()) / len(pattern.encode()))
        case {"type": "Replace", "content": str(content)}:  # an expression may match nothing
            return 1 + len(content.encode())
        case {"type": "Prepend", "prepend": str(prepend)}:
            return 1 + len(prepend.encode())
        case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:  # a trie, then texts
            raw = base64.b64decode(charsmap)
            return max(1, *map(len, raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")))
        case {"type": str(kind)} if kind in _GROWTH:
            return _GROWTH[kind]
    raise TokenizerUnsupported(f"normalizer: {str(normalizer)[:60]} is not known")
