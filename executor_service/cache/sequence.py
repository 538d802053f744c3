"""One sequence: its known tokens, how many of them are cached, and which are pending."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from executor_service.adapters.registry import LoadedAdapter
from executor_service.cache.block_table import BlockTable
from executor_service.contract.plan import PoolingKind, Sampling, TokenIds
from executor_service.grammar.automaton import Automaton

HiddenSum = NDArray[np.float64]
"""Sum of hidden states, [hidden], in multiples of `HIDDEN_UNIT`."""

_NOTHING = range(0)


class CachedSequence:
    """The state of one cache id. Owned by its session, changed by the device thread only.

    The KV of `ids[:length]` is cached; `ids[length:known]` are pending. Elements of `ids` from `known` on are
    not part of the sequence: drafts that are being verified, or unused capacity.
    """

    __slots__ = (
        "adapter",
        "automaton",
        "hidden_sum",
        "ids",
        "known",
        "length",
        "only_draws",
        "pooling",
        "prompt_length",
        "renewed_s",
        "salt",
        "sampled",
        "sampling",
        "scored",
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
        automaton: Automaton | None = None,
        adapter: LoadedAdapter | None = None,
        pooling: PoolingKind = PoolingKind.LAST,
        hidden_sum: HiddenSum | None = None,
        scored: range = _NOTHING,
    ) -> None:
        self.table = table
        self.ids = ids  # int32; grows by doubling
        self.length = length  # KV length, in tokens
        self.known = len(ids)
        self.sampled = False  # the only pending token is the one sampled last
        self.prompt_length = prompt_length
        self.sampling = sampling
        self.salt = salt
        self.automaton = automaton  # of the sampling's grammar, wherever in the output it was needed last
        self.adapter = adapter  # one hold on it is the sequence's
        self.renewed_s = renewed_s  # last use, by the lease clock; session 0 has a lease for each sequence
        self.pooling = pooling
        # With PoolingKind.MEAN, of the first `length` tokens, until the opening's tokens are all computed.
        self.hidden_sum = hidden_sum
        self.scored = scored  # positions of the opening's tokens that get scores when they are computed
        # Its rows that feed a sampled token want the next one, drawn from the model's own logits, no more.
        self.only_draws = (
            sampling.only_draws and adapter is None and pooling is PoolingKind.LAST and not scored
        )

    @property
    def output(self) -> TokenIds:
        """The known tokens after the prompt; a view."""
        return self.ids[self.prompt_length : self.known]

    def make_room(self, tokens: int) -> None:
        """Let `ids` hold at least this number of tokens."""
        if tokens > len(self.ids):
            grown = np.zeros(max(tokens, 2 * len(self.ids)), np.int32)
            grown[: len(self.ids)] = self.ids
            self.ids = grown

    def forget_pending(self, length: int) -> None:
        """Drop the pending tokens, and all but the first `length` cached ones."""
        self.length = self.known = length
        self.sampled = False
        self.hidden_sum, self.scored = None, _NOTHING  # the rest of the opening is not computed any more
