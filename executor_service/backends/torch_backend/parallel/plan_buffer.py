"""Rank 0's calls as int32 arrays, from which the other ranks make the same calls."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from executor_service.contract.forward_view import ForwardView
from executor_service.contract.plan import TokenIds

Body = NDArray[np.int32]

_WANTS = ("hidden", "embedding", "logits")


class CollectiveCall(enum.IntEnum):
    """The methods of a `Backend` that all ranks make together."""

    CLOSE = 0
    ALLOCATE = 1  # pages, page size
    COPY_PAGE = 2  # source, target
    REPEAT = 3  # what rank 0's `Runner` tells the others'
    FORWARD_ONCE = 4
    DEFAULT_PAGES = 5  # page size, rows, tokens
    LOAD_ADAPTER = 6  # what `adapter_buffer` makes of it
    UNLOAD_ADAPTER = 7  # slot
    OFFER_ADAPTERS = 8  # slots


def pack_inputs(inputs: Sequence[TokenIds], want: frozenset[str], view: ForwardView) -> Body:
    """Bits of "hidden", "embedding" and "logits"; the range that comes back; then the inputs.

    These are their number, the length of each, and all tokens.
    """
    bits = sum(1 << i for i, name in enumerate(_WANTS) if name in want)
    head = np.array([bits, view.first, view.count, len(inputs), *(len(tokens) for tokens in inputs)])
    return np.concatenate([head, *inputs]).astype(np.int32)


def unpack_inputs(body: Body) -> tuple[list[TokenIds], frozenset[str], ForwardView]:
    """The arguments of `pack_inputs`."""
    bits, first, returned, count = body[:4].tolist()
    want = frozenset(name for i, name in enumerate(_WANTS) if bits >> i & 1)
    ends = 4 + count + np.cumsum(body[4 : 4 + count])
    return np.split(body, [4 + count, *ends])[1 : 1 + count], want, ForwardView(first, returned)
