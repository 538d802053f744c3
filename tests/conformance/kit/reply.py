"""A StepResult, unpacked: one `RowReply` per row, however the arrays on the wire lay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np
from numpy.typing import NDArray
from paceline.executor.v1 import executor_pb2 as pb

CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(slots=True)
class RowReply:
    """One row's or opening's answer; `code` other than OK means that it was refused."""

    kv_length: int
    tokens: list[int]
    cached_length: int = 0
    detail: pb.RowDetail = field(default_factory=pb.RowDetail)
    code: grpc.StatusCode = grpc.StatusCode.OK
    message: str = ""
    reason: pb.ErrorReason.ValueType = pb.ERROR_REASON_UNSPECIFIED
    known_length: int | None = None  # Error.kv_length

    @property
    def logits(self) -> NDArray[np.float32]:
        """FULL output: [outputs, vocabulary]."""
        return tensor(self.detail.logits)

    @property
    def logprobs(self) -> list[float]:
        """One per token."""
        return list(self.detail.logprobs)

    @property
    def top_ids(self) -> NDArray[np.int64]:
        """[outputs, k], most likely first."""
        return np.array(self.detail.top_ids, dtype=np.int64).reshape(-1, self.detail.k)

    @property
    def top_logprobs(self) -> NDArray[np.float64]:
        """[outputs, k], in the order of `top_ids`."""
        return np.array(self.detail.top_logprobs, dtype=np.float64).reshape(-1, self.detail.k)


@dataclass(slots=True)
class OpReply:
    """One op's answer."""

    kv_length: int
    released: int
    code: grpc.StatusCode = grpc.StatusCode.OK
    message: str = ""
    reason: pb.ErrorReason.ValueType = pb.ERROR_REASON_UNSPECIFIED
    known_length: int | None = None


@dataclass(slots=True)
class Reply:
    """One step's answer: rows first, then openings, in the order they were sent."""

    rows: list[RowReply]
    ops: list[OpReply]
    raw: pb.StepResult

    @property
    def available_pages(self) -> int:
        """Free pages and those that only the prefix cache holds."""
        return self.raw.free_pages + self.raw.evictable_pages


def tensor(message: pb.Tensor) -> NDArray[np.float32]:
    """A Tensor as an array; its bytes must be exactly what its shape says."""
    return np.frombuffer(message.data, dtype="<f4").reshape(tuple(message.shape))


def unpack(result: pb.StepResult, openings: int) -> Reply:
    """Take a result apart, checking that its parallel arrays agree in length."""
    arrays = result.rows
    counts = list(arrays.token_counts)
    assert len(arrays.kv_lengths) == len(counts), "kv_lengths and token_counts differ in length"
    assert sum(counts) == len(arrays.tokens), "token_counts do not add up to tokens"
    assert len(arrays.cached_lengths) == openings, "not one cached_length per opening"
    rows, at = [], 0
    for kv_length, count in zip(arrays.kv_lengths, counts, strict=True):
        rows.append(RowReply(kv_length, list(arrays.tokens[at : at + count])))
        at += count
    for row, cached_length in zip(rows[len(rows) - openings :], arrays.cached_lengths, strict=True):
        row.cached_length = cached_length
    for detail in arrays.details:
        rows[detail.row].detail = detail
    ops = [OpReply(op.kv_length, op.released) for op in result.ops]
    _attach(rows, arrays.errors)
    _attach(ops, result.op_errors)
    for row in rows:
        if row.code is not grpc.StatusCode.OK:
            assert (row.kv_length, row.tokens, row.cached_length) == (0, [], 0), "a refused row has results"
    return Reply(rows, ops, result)


def _attach(entries: Sequence[RowReply | OpReply], errors: Sequence[pb.Error]) -> None:
    for error in errors:
        entry = entries[error.index]
        assert entry.code is grpc.StatusCode.OK, f"two errors for entry {error.index}"
        entry.code, entry.message = CODES[error.code], error.message
        entry.reason = error.reason
        entry.known_length = error.kv_length if error.HasField("kv_length") else None
        assert entry.message, f"the error of entry {error.index} has no message"
        assert entry.reason != pb.ERROR_REASON_UNSPECIFIED, f"the error of entry {error.index} has no reason"
