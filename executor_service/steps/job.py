"""One accepted row of a step, on its way through the device."""

from __future__ import annotations

import numpy as np

from executor_service.backends.base import RowOutput
from executor_service.cache.sequence import Sequence
from executor_service.contract.plan import OutputMode, TokenIds

NO_TOKENS: TokenIds = np.zeros(0, np.int32)


class Job:
    """An accepted row. What its sequence has and knows changes only when it is committed."""

    __slots__ = (
        "drafts", "end", "fed", "follows", "hit", "in_prompt", "index", "known", "left", "opened", "output",
        "outputs", "overwritten", "parts", "sequence", "start", "tokens", "top_k",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        sequence: Sequence,
        start: int,
        fed: int,
        end: int,
        known: int,
        output: OutputMode,
        top_k: int,
    ) -> None:
        self.index = index  # in the step's results
        self.sequence = sequence
        self.start = start  # of the next forward
        self.in_prompt = start < sequence.prompt_length  # it computes prompt tokens
        self.fed = fed  # tokens in the next forward, drafts included
        self.end = end  # what is reserved: the KV length if all drafts are accepted and all steps taken
        self.known = known  # tokens known once this row is done, but for what it samples
        self.output, self.top_k = output, top_k
        self.outputs = 0  # positions to bring back
        self.drafts = NO_TOKENS
        self.left = 1  # tokens still to sample
        self.tokens: list[int] = []  # sampled so far
        self.parts: list[RowOutput] = []  # one per forward, where the row has several
        self.overwritten = -1  # the sampled token whose place given tokens took
        self.opened = self.hit = 0  # an opening's cache id and prefix hit
        self.follows = -1  # the place in the batch ahead of the row that samples what this one feeds

    @property
    def foreseen(self) -> int:
        """Tokens known once this row is done, what it samples included; of a row with at most one output."""
        return max(self.known, self.end) + self.outputs  # drafts whose outputs nobody asked for are kept
