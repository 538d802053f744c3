"""Equal tokens under equal ids are one vocabulary, in whatever form the file has them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from executor_service.backends.byte_tokenizer import byte_tokenizer
from executor_service.runtime.runtime import vocabulary_fingerprint

TOKENIZER: dict[str, Any] = json.loads(byte_tokenizer().tokenizer_json)
FINGERPRINT = vocabulary_fingerprint(byte_tokenizer().tokenizer_json)


def of(**changes: Any) -> bytes:
    return vocabulary_fingerprint(json.dumps(TOKENIZER | changes, indent=1).encode())


def of_vocab(vocab: object) -> bytes:
    return of(model=TOKENIZER["model"] | {"vocab": vocab})


@pytest.mark.parametrize("changes", [{}, {"post_processor": {"type": "X"}}, {"pre_tokenizer": None}])
def test_form_does_not_count(changes: dict[str, Any]) -> None:
    assert of(**changes) == FINGERPRINT


def test_nor_does_the_order_of_entries_or_where_a_special_token_stands() -> None:
    vocab: dict[str, int] = TOKENIZER["model"]["vocab"]
    backwards = dict(reversed(vocab.items()))
    assert of_vocab(backwards) == FINGERPRINT
    assert of_vocab({token: i for token, i in vocab.items() if i != 256}) == FINGERPRINT


def test_nor_does_filler() -> None:
    vocab: dict[str, int] = TOKENIZER["model"]["vocab"]
    assert of_vocab(vocab | {"[PAD257]": 257, "[PAD258]": 258}) == FINGERPRINT
    assert of_vocab(vocab | {"[PAD1]": 257}) != FINGERPRINT


def test_every_token_and_every_id_counts() -> None:
    vocab: dict[str, int] = TOKENIZER["model"]["vocab"]
    swapped = vocab | {"a": vocab["b"], "b": vocab["a"]}
    added = [TOKENIZER["added_tokens"][0] | {"content": "<|end|>"}]
    others = [of_vocab(swapped), of_vocab(vocab | {"ab": 257}), of(added_tokens=added)]
    assert len({FINGERPRINT, *others}) == 4


def test_a_list_of_scored_tokens_is_in_the_order_of_ids() -> None:
    tokens = [[token, -1.0] for token, _ in sorted(TOKENIZER["model"]["vocab"].items(), key=lambda t: t[1])]
    assert of_vocab(tokens) == FINGERPRINT
