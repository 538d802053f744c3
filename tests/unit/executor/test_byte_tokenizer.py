"""The byte tokenizer is a valid `tokenizers` file that loses nothing."""

from __future__ import annotations

import json

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from executor_service.backends.base import ModelError
from executor_service.backends.byte_tokenizer import EOS_ID, EOS_TOKEN, VOCAB_SIZE, byte_tokenizer
from executor_service.backends.oracle_backend.oracle import OracleBackend
from executor_service.backends.oracle_backend.settings import OracleSettings

FILES = byte_tokenizer()
TOKENIZER = Tokenizer.from_str(FILES.tokenizer_json.decode())


@given(st.text())
def test_ids_are_the_utf8_bytes_and_any_text_round_trips(text: str) -> None:
    text = text.replace(EOS_TOKEN, "")
    ids = TOKENIZER.encode(text).ids
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


@given(st.binary())
def test_any_bytes_decode(data: bytes) -> None:
    assert TOKENIZER.decode(list(data)) == data.decode(errors="replace")


def test_every_id_has_a_token() -> None:
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(VOCAB_SIZE))


def test_eos_is_special() -> None:
    assert TOKENIZER.encode(f"a{FILES.eos_token}b").ids == [97, EOS_ID, 98]
    assert TOKENIZER.decode([97, EOS_ID, 98]) == "ab"


def test_the_file_is_plain_json() -> None:
    assert json.loads(FILES.tokenizer_json)["model"]["merges"] == []


def test_the_chat_template_names_roles_and_prompts_for_an_answer() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    template = jinja2.Template(FILES.chat_template, keep_trailing_newline=True)
    text = template.render(messages=messages, add_generation_prompt=True)
    assert text == "system: Be brief.\nuser: Hi\nassistant: "
    assert template.render(messages=messages, add_generation_prompt=False) == "system: Be brief.\nuser: Hi\n"


def test_a_vocabulary_too_small_for_bytes_has_no_tokenizer() -> None:
    backend = OracleBackend(OracleSettings(vocab_size=256))
    assert not backend.info.has_tokenizer
    assert backend.info.eos_token_ids == ()
    with pytest.raises(ModelError, match="256"):
        backend.tokenizer()
