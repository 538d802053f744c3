"""The fingerprint of a vocabulary: two models with the same one agree on the text of every token id."""

from __future__ import annotations

import hashlib
import json


def vocabulary_fingerprint(tokenizer_json: bytes) -> bytes:
    """SHA-256 over the tokens of a tokenizer.json and their ids.

    It covers neither how text is split nor how the file is formatted, so that a GGUF file and a directory of
    the same model have the same one, nor the padding that GGUF converters add: a token `[PADn]` with id n.
    """
    tokenizer = json.loads(tokenizer_json)
    tokens = tokenizer["model"]["vocab"]
    if isinstance(tokens, dict):
        ids = {int(i): str(token) for token, i in tokens.items()}
    else:  # Unigram: [token, score] in the order of ids
        ids = {i: str(token) for i, (token, _) in enumerate(tokens)}
    ids |= {int(added["id"]): str(added["content"]) for added in tokenizer.get("added_tokens") or ()}
    known = [[i, token] for i, token in sorted(ids.items()) if token != f"[PAD{i}]"]
    return hashlib.sha256(json.dumps(known).encode()).digest()
