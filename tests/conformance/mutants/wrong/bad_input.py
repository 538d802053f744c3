"""Limits: caught by test_bad_input.py."""

from __future__ import annotations

from typing import Any

from executor_service.rpc.codec import tokens as tokens_codec
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def limits_unchecked() -> None:
    """token ids beyond the vocabulary are let in"""

    def tokens(original: Any, field: str, packed: Any, limits: Any) -> Any:
        return original(field, [token % limits.vocab_size for token in packed], limits)

    wrap(tokens_codec, "decode_tokens", tokens)
