"""Texts are cut into words as llama.cpp cuts them, by the name of the pre-tokenizer in a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.files.gguf_file import GgufFile
from executor_service.backends.torch_backend.files.tokenizer_files import tokenizer_from_gguf

TEXT = "x1234 y!\n(a'S\t\n"
_SINGLE_DIGITS = ["x", "1", "2", "3", "4", " y"]
WORDS: dict[str, list[str]] = {
    "gpt-2": ["x", "1234", " y", "!", "\n", "(", "a", "'", "S", "\t\n"],
    "exaone4": ["x", "1234", " y", "!", "\n", "(", "a", "'", "S", "\t\n"],
    "olmo": ["x", "1234", " y", "!", "\n", "(", "a", "'", "S", "\t\n"],
    "smollm": [*_SINGLE_DIGITS, "!", "\n", "(", "a", "'", "S", "\t\n"],
    "refact": [*_SINGLE_DIGITS, "!", "\n", "(", "a", "'", "S", "\t\n"],
    "exaone": [*_SINGLE_DIGITS, "!", "\n", "(", "a", "'", "S", "\t\n"],
    "llama-bpe": ["x", "123", "4", " y", "!\n", "(a", "'S", "\t\n"],
    "dbrx": ["x", "123", "4", " y", "!\n", "(a", "'S", "\t\n"],
    "gpt-4o": ["x", "123", "4", " y", "!\n", "(a'S", "\t\n"],
    "minimax-m2": ["x", "123", "4", " y", "!\n", "(a'S", "\t\n"],
    "tekken": [*_SINGLE_DIGITS, "!\n", "(a", "'S", "\t\n"],
    "glm4": ["x", "123", "4", " y", "!\n", "(a", "'S", "\t\n"],
    "chatglm-bpe": ["x", "123", "4", " y", "!\n", "(a", "'S", "\t\n"],
    "hunyuan": [*_SINGLE_DIGITS, "!\n", "(a", "'S", "\t\n"],
    "hunyuan-dense": ["x", "123", "4", " y", "!\n", "(a", "'S", "\t\n"],
    "qwen2": [*_SINGLE_DIGITS, "!\n", "(a", "'S", "\t\n"],
    "seed-coder": [*_SINGLE_DIGITS, "!", "\n", "(a", "'S", "\t\n"],
}


CASED = "aMyHTTPServer's мойМир!/\n/Ünï ﬁX"
CASED_WORDS = {
    "gpt-4o": ["a", "My", "HTTPServer's", " мой", "Мир", "!/\n/", "Ünï", " ﬁ", "X"],
    "tekken": ["a", "My", "HTTPServer", "'s", " мой", "Мир", "!/\n/", "Ünï", " ﬁ", "X"],
    "llama-bpe": ["aMyHTTPServer", "'s", " мойМир", "!/\n", "/Ünï", " ﬁX"],
}
CHINESE = "aMy漢字とカナ12345年 é!x  [hi]_b"
CHINESE_WORDS = {
    "hunyuan-dense": ["aMy", "漢字とカナ", "123", "45", "年", " é", "!x", " ", " [", "hi", "]_", "b"],
    "hunyuan": ["aMy漢字とカナ", *"12345", "年", " é", "!x", " ", " [", "hi", "]_", "b"],
}


def file_with(pre: str, path: Path) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*sorted(ByteLevel.alphabet()), "x1"])
    writer.add_token_merges(["x 1"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_those_of_the_named_pre_tokenizer(pre: str, tmp_path: Path) -> None:
    file = file_with(pre, tmp_path / "model.gguf")
    tokenizer: Any = Tokenizer.from_str(tokenizer_from_gguf(file).tokenizer_json.decode())
    file.close()
    for text, expected in (
        (TEXT, WORDS[pre]),
        (CASED, CASED_WORDS.get(pre)),
        (CHINESE, CHINESE_WORDS.get(pre)),
    ):
        words = [text[first:last] for _, (first, last) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        assert words == (expected or words)


@pytest.mark.parametrize(("pre", "expected"), [("tekken", True), ("llama-bpe", True), ("gpt-4o", False)])
def test_a_file_that_does_not_say_whether_texts_begin_with_bos_has_its_pre_tokenizers_answer(
    pre: str, expected: bool, tmp_path: Path
) -> None:
    file = file_with(pre, tmp_path / "model.gguf")
    assert not tokenizer_from_gguf(file).add_bos  # it has no such token
    file.metadata["tokenizer.ggml.bos_token_id"] = 0
    assert tokenizer_from_gguf(file).add_bos == expected
    file.metadata["tokenizer.ggml.add_bos_token"] = False
    assert not tokenizer_from_gguf(file).add_bos
    file.close()


def test_another_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    file = file_with("viking", tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="'viking' is not supported"):
        tokenizer_from_gguf(file)
    file.close()
