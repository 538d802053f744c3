"""Texts to be embedded get all tokens of the tokenizer's post-processor; other texts get none but BOS."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from scheduler_service.text.items import PlainItem, WholeItem
from scheduler_service.text.worker.encoder import Encoder, Files
from scheduler_service.text.worker.items import ItemError, item_ids

BEGIN, END, A, B = 0, 1, 2, 3
BEGIN_END = [("<s>", BEGIN), ("</s>", END)]
TEMPLATE = processors.TemplateProcessing
POST_PROCESSORS: dict[str, tuple[Any, list[int]]] = {
    "none": (None, [A, B]),
    "byte-level": (processors.ByteLevel(trim_offsets=False), [A, B]),
    "end": (TEMPLATE(single="$A </s>", special_tokens=BEGIN_END[1:]), [A, B, END]),
    "begin": (TEMPLATE(single="<s> $A", special_tokens=BEGIN_END[:1]), [BEGIN, A, B]),
    "pair": (
        TEMPLATE(single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=BEGIN_END),
        [BEGIN, A, B, END],
    ),
    "bert": (processors.BertProcessing(("</s>", END), ("<s>", BEGIN)), [BEGIN, A, B, END]),
    "sequence": (
        processors.Sequence(
            [processors.ByteLevel(), TEMPLATE(single="$A </s> </s>", special_tokens=BEGIN_END[1:])]
        ),
        [A, B, END, END],
    ),
}


def encoder_with(post_processor: Any, *, add_bos: bool) -> Encoder:
    tokenizer = Tokenizer(models.BPE({"<s>": BEGIN, "</s>": END, "a": A, "b": B}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = [AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")]
    tokenizer.add_special_tokens(special)
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    tokenizer.enable_truncation(1)  # whatever a file says
    return Encoder(Files(tokenizer.to_str().encode(), "", "<s>", "</s>", add_bos))


def encoded(encoder: Encoder, *items: PlainItem | WholeItem) -> list[int]:
    payload = json.dumps([item.sent() for item in items]).encode()
    return list(item_ids(encoder, payload, 100)[1])


@pytest.mark.parametrize("name", POST_PROCESSORS)
def test_a_whole_text_has_the_post_processors_tokens_and_a_plain_one_has_not(name: str) -> None:
    post_processor, whole = POST_PROCESSORS[name]
    add_bos = whole[0] == BEGIN
    encoder = encoder_with(post_processor, add_bos=add_bos)
    assert encoded(encoder, WholeItem("f", "ab")) == whole
    assert encoded(encoder, PlainItem("f", "ab")) == [*([BEGIN] if add_bos else []), A, B]


@pytest.mark.parametrize("name", POST_PROCESSORS)
def test_a_text_that_must_vary_may_not_begin_with_a_token_that_all_texts_begin_with(name: str) -> None:
    post_processor, whole = POST_PROCESSORS[name]
    encoder = encoder_with(post_processor, add_bos=False)
    item = WholeItem("inputs[0].text", "<s>ab", varies=True)  # written, not added
    if whole[0] == BEGIN:
        with pytest.raises(ItemError, match="POOLING_CLS") as refused:
            encoded(encoder, item)
        assert refused.value.field == "inputs[0].text"
    else:
        assert encoded(encoder, item) == [BEGIN, *whole]
