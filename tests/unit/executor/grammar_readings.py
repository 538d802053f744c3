"""A grammar engine for bytes, and what texts its grammars allow."""

from __future__ import annotations

import json

import numpy as np

from executor_service.backends.byte_tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer
from executor_service.contract.grammar import Grammar
from executor_service.contract.masks import allowed_tokens
from executor_service.grammar.engine import GrammarEngine
from executor_service.grammar.source import GrammarSource

COMPILE_FUEL, STEP_FUEL = 1_000_000, 50_000
ENGINE = GrammarEngine(byte_tokenizer().tokenizer_json, VOCAB_SIZE, (EOS_ID,), COMPILE_FUEL, STEP_FUEL)


def ids(text: str | bytes) -> np.ndarray:
    return np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8).astype(np.int32)


def matches(grammar: Grammar, text: str) -> bool:
    """Whether a text is one of the grammar: it may be written, and end there."""
    matcher = grammar.matcher()
    return matcher.consume(ids(text)) == len(ids(text)) and EOS_ID in allows(matcher.mask())


def allows(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(allowed_tokens(mask, VOCAB_SIZE)).tolist())


def of(kind: str, text: str) -> Grammar:
    return ENGINE.compile(GrammarSource(kind, text))  # type: ignore[arg-type]


def schema(value: object) -> Grammar:
    return of("json_schema", json.dumps(value))


OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 40},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
