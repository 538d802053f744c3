"""Files of a tokenizer in the executor: read, never run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, processors

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.files.tokenizer_files import tokenizer_from_directory

TEMPLATE = {"type": "TemplateProcessing", "pair": [], "single": [{"Sequence": {"id": "A", "type_id": 0}}]}
BERT = processors.BertProcessing(("</s>", 2), ("<s>", 1))
BEGINS = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
ENDS = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])


def write(path: Path, processor: Any = None, **changes: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"x": 0, "<s>": 1, "</s>": 2}, unk_token="x"))
    tokenizer.add_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    if processor is not None:
        tokenizer.post_processor = processor
    (path / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str()) | changes))
    (path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    return tokenizer


@pytest.mark.parametrize(
    "processor",
    [
        None,
        BERT,
        BEGINS,
        ENDS,
        processors.ByteLevel(),
        processors.RobertaProcessing(("</s>", 2), ("<s>", 1)),
        processors.Sequence([processors.ByteLevel(), BEGINS]),
        processors.Sequence([BEGINS, ENDS]),
        processors.Sequence([ENDS, processors.ByteLevel()]),
    ],
)
def test_bos_is_added_where_the_post_processor_puts_it_first(tmp_path: Path, processor: Any) -> None:
    tokenizer = write(tmp_path, processor)
    expected = tokenizer.encode("x").ids[:1] == [1]
    assert tokenizer_from_directory(tmp_path).add_bos == expected


@pytest.mark.parametrize(
    "changes",
    [
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"String": "x"}, "content": "xx"}] * 40,
            }
        },
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"String": "s"}, "content": "ss"}] * 40,
            },
            "added_tokens": [
                {"id": 1, "content": "<s>"}
                | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
                | dict.fromkeys(("normalized", "special"), True)
            ],
        },
        {"post_processor": TEMPLATE | {"special_tokens": {}}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    ],
)
def test_no_text_is_tokenized_when_a_tokenizers_files_are_read(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    write(tmp_path, **changes)
    assert not tokenizer_from_directory(tmp_path).add_bos


def test_a_tokenizer_at_which_the_library_panics_is_refused_by_the_files_name(tmp_path: Path) -> None:
    write(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with pytest.raises(ModelError, match=r"tokenizer\.json: .*charsmap"):
        tokenizer_from_directory(tmp_path)
