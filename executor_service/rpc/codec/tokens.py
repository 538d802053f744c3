"""Token ids of messages as int32 arrays, each id below the vocabulary size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from paceline.executor.v1 import executor_pb2 as pb

from executor_service.contract.limits import Limits
from executor_service.contract.plan import NO_TOKENS, Refusal, TokenIds
from executor_service.rpc.codec.refusals import invalid, oversized, refused, too_large


def decode_tokens(
    field: str, packed: Sequence[int] | NDArray[np.uint32], limits: Limits
) -> TokenIds | Refusal:
    """One prompt or input: 1 to `context_length` ids."""
    if not 1 <= len(packed) <= limits.context_length:
        return too_large(f"{field}: 1 to {limits.context_length} ids (context_length), has {len(packed)}")
    wide = np.array(packed, np.int64)
    if (max_id := int(wide.max())) >= limits.vocab_size:
        return invalid(f"{field}: ids below {limits.vocab_size}, has {max_id}")
    return wide.astype(np.int32)


def opening_tokens(field: str, opening: pb.Opening, limits: Limits) -> TokenIds | Refusal:
    """The prompt of an opening, whichever of the two fields holds it."""
    packed = opening.packed_tokens
    if not packed:
        return decode_tokens(f"{field}.tokens", opening.tokens, limits)
    if opening.tokens:
        return invalid(f"{field}.packed_tokens: not together with tokens")
    if len(packed) % 4:
        return invalid(f"{field}.packed_tokens: 4 bytes for each id, has {len(packed)} bytes")
    return decode_tokens(f"{field}.packed_tokens", np.frombuffer(packed, "<u4"), limits)


def decode_ragged(
    name: str, packed: Sequence[int], counts: Sequence[int], count: int, limits: Limits
) -> tuple[list[TokenIds], dict[int, Refusal]]:
    """Cut a packed array into the rows' ids. Raises RequestRefused where the counts do not fit it.

    Also returns, by row, the refusals of the rows that have an id outside the vocabulary.
    """
    field = f"rows.{name[:-1]}_counts"
    if not counts:
        if packed:
            raise refused(f"{field}: required with rows.{name}")
        return [NO_TOKENS] * count, {}
    if len(counts) != count:
        raise refused(f"{field}: {len(counts)} entries for {count} rows")
    ends = list(accumulate(counts))
    if ends and ends[-1] != len(packed):
        raise refused(f"{field}: they sum to {ends[-1]}, rows.{name} has {len(packed)} entries")
    max_ids = max(limits.max_step_tokens, limits.context_length)
    if len(packed) > max_ids:
        raise oversized(f"rows.{name}: at most {max_ids} in a step, has {len(packed)}")
    wide: NDArray[np.int64] = np.array(packed, np.int64)
    ids = wide.astype(np.int32)
    begins = [0, *ends[:-1]]
    bad: dict[int, Refusal] = {}
    if wide.size and int(wide.max()) >= limits.vocab_size:
        for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            if end > begin and (max_id := int(wide[begin:end].max())) >= limits.vocab_size:
                bad[i] = invalid(f"rows.{name}[{i}]: ids below {limits.vocab_size}, has {max_id}")
    return [ids[a:b] if b > a else NO_TOKENS for a, b in zip(begins, ends, strict=True)], bad
