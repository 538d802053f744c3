"""A stranger's tokenizer.json costs the grammar engine bounded time, or grammars are not offered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from executor_service.backends.byte_tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer
from executor_service.grammar import tokenizer as module
from executor_service.grammar.engine import GrammarEngine
from executor_service.grammar.tokenizer import TokenizerUnsupported, engine_tokenizer

DOUBLES = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
PADDING = {
    "strategy": {"Fixed": 1_000_000_000},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "a",
}


def file(**fields: Any) -> bytes:
    return json.dumps(json.loads(byte_tokenizer().tokenizer_json) | fields).encode()


def added(number: int) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return [{"id": VOCAB_SIZE + i, "content": f"<{i}>", **flags} for i in range(number)]


@pytest.mark.parametrize(
    ("name", "given", "complaint"),
    [
        (
            "doublings",
            file(normalizer={"type": "Sequence", "normalizers": 34 * [DOUBLES]}),
            "lengthen a text",
        ),
        ("a long prefix", file(normalizer={"type": "Prepend", "prepend": "x" * 1000}), "lengthen a text"),
        ("an unknown normalizer", file(normalizer={"type": "Expand"}), "is not known"),
        ("no vocabulary", b'{"model": {}}', "KeyError"),
        ("a list", b"[]", "AttributeError"),
        ("nested deep", b'{"normalizer":' * 100_000, "RecursionError"),
        ("no JSON", b"\xff", "UnicodeDecodeError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_may_take_unlimited_time_is_refused_before_the_library_sees_it(
    name: str, given: bytes, complaint: str
) -> None:
    with pytest.raises(TokenizerUnsupported, match=complaint):
        engine_tokenizer(given, VOCAB_SIZE, [EOS_ID])


def test_the_numbers_of_added_tokens_and_of_their_characters_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MAX_ADDED_TOKENS", 3)
    engine_tokenizer(file(added_tokens=added(3)), VOCAB_SIZE + 3, [EOS_ID])
    with pytest.raises(TokenizerUnsupported, match="added_tokens: 4 tokens, at most 3"):
        engine_tokenizer(file(added_tokens=added(4)), VOCAB_SIZE + 4, [EOS_ID])
    monkeypatch.setattr(module, "_MAX_TOKEN_BYTES", 100)
    with pytest.raises(TokenizerUnsupported, match="at most 100 are read"):
        engine_tokenizer(file(), VOCAB_SIZE, [EOS_ID])


def test_what_adds_tokens_to_a_text_is_left_out() -> None:
    GrammarEngine(file(padding=PADDING), VOCAB_SIZE, (EOS_ID,), 1_000_000, 1_000_000)
