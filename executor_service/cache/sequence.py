"""One sequence: the tokens known, how many of them have KV, and what is pending."""

from __future__ import annotations

import numpy as np

from executor_service.cache.kv_cache import BlockTable
from executor_service.contract.plan import Sampling, TokenIds


class CachedSequence:
    """The state behind one cache id. Owned by its session, changed by the worker thread only.

    `ids[:length]` have KV, `ids[length:known]` are pending. `ids` may hold more than `known`: drafts
    that are being verified, which count for nothing until they are accepted.
    """

    __slots__ = (
        "ids",
        "known",
        "length",
        "prompt_length",
        "renewed_s",
        "salt",
        "sampled",
        "sampling",
        "table",
    )

    def __init__(
        self,
        table: BlockTable,
        ids: TokenIds,
        *,
        length: int,
        prompt_length: int,
        sampling: Sampling,
        salt: bytes,
        renewed_s: float,
    ) -> None:
        self.table = table
        self.ids = ids  # int32, grown by doubling
        self.length = length  # the KV length n
        self.known = len(ids)
        self.sampled = False  # what is pending is the one token sampled last
        self.prompt_length = prompt_length
        self.sampling = sampling
        self.salt = salt
        self.renewed_s = renewed_s  # lease clock; counts in session 0, which has no owner

    def make_room(self, tokens: int) -> None:
        """Let `ids` hold at least so many tokens."""
        if tokens > len(self.ids):
            grown = np.zeros(max(tokens, 2 * len(self.ids)), np.int32)
            grown[: len(self.ids)] = self.ids
            self.ids = grown

    def forget_pending(self, length: int) -> None:
        """Keep `length` tokens, all of them with KV."""
        self.length = self.known = length
        self.sampled = False
