"""Incremental text is exact: however the ids are cut, and equal to the library's own decode."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from scheduler_service.text.detokenizer import Detokenizer
from scheduler_service.text.vocabulary import Vocabulary
from scheduler_service.text.worker.pieces import MAX_IDS, UnsupportedTokenizerError, pieces_of
from tests.support.untyped import present
from tests.unit.scheduler_shell import tokenizers_made_here as made

ids_lists = st.lists(st.integers(0, 10_000), max_size=40)


def incremental(vocabulary: Vocabulary, pieces: list[list[int]]) -> str:
    detokenizer = Detokenizer(vocabulary)
    return "".join([detokenizer.push(piece) for piece in pieces]) + detokenizer.flush()


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(edges)]


@given(ids_lists, st.lists(st.integers(0, 100)))
def test_any_split_of_byte_level_ids_equals_the_whole_decode(ids: list[int], cuts: list[int]) -> None:
    tokenizer = made.byte_level()
    ids = [id_ % tokenizer.get_vocab_size() for id_ in ids]
    assert incremental(Vocabulary(pieces_of(tokenizer)), cut(ids, cuts)) == tokenizer.decode(ids)


@given(ids_lists, st.lists(st.integers(0, 100)))
def test_any_split_of_words_equals_the_whole_decode(ids: list[int], cuts: list[int]) -> None:
    tokenizer = made.words()
    ids = [id_ % tokenizer.get_vocab_size() for id_ in ids]
    assert incremental(Vocabulary(pieces_of(tokenizer)), cut(ids, cuts)) == tokenizer.decode(ids)


@given(st.text(max_size=40), st.lists(st.integers(0, 100)))
def test_valid_text_through_byte_fallback_equals_the_whole_decode(text: str, cuts: list[int]) -> None:
    tokenizer = made.byte_fallback()
    ids = tokenizer.encode("▁" + text.replace(" ", "▁")).ids
    assert incremental(Vocabulary(pieces_of(tokenizer)), cut(ids, cuts)) == tokenizer.decode(ids)


@given(ids_lists, st.lists(st.integers(0, 100)))
def test_any_split_of_any_fallback_bytes_gives_one_text(ids: list[int], cuts: list[int]) -> None:
    tokenizer = made.byte_fallback()
    ids = [id_ % tokenizer.get_vocab_size() for id_ in ids]
    vocabulary = Vocabulary(pieces_of(tokenizer))
    assert incremental(vocabulary, cut(ids, cuts)) == incremental(vocabulary, [ids])


def test_only_an_unfinished_character_is_held_back() -> None:
    tokenizer = made.byte_level()
    detokenizer = Detokenizer(Vocabulary(pieces_of(tokenizer)))
    face = [present(tokenizer.token_to_id(piece)) for piece in "ðŁĺĢ"]  # U+1F600 as four bytes
    assert [detokenizer.push([id_]) for id_ in face] == ["", "", "", "😀"]
    assert detokenizer.push([*face[:3], present(tokenizer.token_to_id("a"))]) == "�a"
    assert detokenizer.push(face[:2]) == ""
    assert detokenizer.flush() == "�"


def test_special_and_unknown_ids_have_no_text() -> None:
    tokenizer = made.byte_level()
    ids = [present(tokenizer.token_to_id("<|end|>")), 10_000_000, present(tokenizer.token_to_id("<think>"))]
    assert incremental(Vocabulary(pieces_of(tokenizer)), [ids]) == "<think>"


@pytest.mark.parametrize(
    "odd",
    [{"ħ": 7, "Ħ": 7, "ı": 7}, {"zz": 2**32 - 1}, {"zz": 450}],
    ids=["one id thrice", "far away", "a gap"],
)
def test_ids_are_counted_to_the_last_that_a_token_has(odd: dict[str, int]) -> None:
    """And not on to MAX_IDS in search of tokens that share an id with another one, or have a higher one."""
    files = json.loads(made.byte_level().to_str())
    files["model"]["vocab"] |= odd
    tokenizer = Tokenizer.from_str(json.dumps(files))
    pieces = pieces_of(tokenizer)
    assert len(pieces.lengths) <= 460
    last = present(tokenizer.token_to_id(" sp"))
    assert len(pieces.lengths) > max(last, *(id_ for id_ in [*odd.values(), 0] if id_ < MAX_IDS))


def test_an_unknown_decoder_is_refused_by_name() -> None:
    tokenizer = Tokenizer.from_str(made.words().to_str())
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedTokenizerError, match="WordPiece"):
        Vocabulary(pieces_of(tokenizer))
