"""What both services say in the same way: revisions of the contract, and a tokenizer in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from paceline.executor.v1 import executor_pb2
from paceline.scheduler.v1 import scheduler_pb2

EXECUTOR_REVISION = 4
"""Of executor.proto; raised whenever something is added to it."""
SCHEDULER_REVISION = 4
"""Of scheduler.proto; raised whenever something is added to it."""

TOKENIZER_PIECE_BYTES = 1 << 20

TokenizerReply = TypeVar(
    "TokenizerReply", bound=executor_pb2.GetTokenizerResponse | scheduler_pb2.GetTokenizerResponse
)


def in_pieces(reply: TokenizerReply) -> Iterator[TokenizerReply]:
    """GetTokenizer's replies: everything in the first, but for the rest of a long `tokenizer_json`.

    `reply` becomes the first one; `paceline.pieces` joins them again.
    """
    json = reply.tokenizer_json
    reply.tokenizer_json = json[:TOKENIZER_PIECE_BYTES]
    yield reply
    for start in range(TOKENIZER_PIECE_BYTES, len(json), TOKENIZER_PIECE_BYTES):
        yield type(reply)(tokenizer_json=json[start : start + TOKENIZER_PIECE_BYTES])
