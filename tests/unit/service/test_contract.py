"""A tokenizer's pieces are below clients' default limits, and are the whole again when joined."""

from __future__ import annotations

import pytest
from paceline.executor.v1 import executor_pb2
from paceline.pieces import Pieces
from paceline.scheduler.v1 import scheduler_pb2
from service_kit.contract import TOKENIZER_PIECE_BYTES, in_pieces


@pytest.mark.parametrize("size", [0, 1, TOKENIZER_PIECE_BYTES, 2 * TOKENIZER_PIECE_BYTES + 1])
@pytest.mark.parametrize("kind", [executor_pb2.GetTokenizerResponse, scheduler_pb2.GetTokenizerResponse])
def test_pieces_are_bounded_and_joined_again(
    kind: type[executor_pb2.GetTokenizerResponse] | type[scheduler_pb2.GetTokenizerResponse], size: int
) -> None:
    whole = kind(tokenizer_json=b"x" * size, chat_template="t", eos_token_ids=[1])
    pieces = list(in_pieces(kind.FromString(whole.SerializeToString())))
    assert all(len(piece.tokenizer_json) <= TOKENIZER_PIECE_BYTES for piece in pieces)
    joined = Pieces[executor_pb2.GetTokenizerResponse | scheduler_pb2.GetTokenizerResponse]()
    for piece in pieces:
        joined.add(piece)
    assert joined.joined() == whole
