"""`AcceptedRow`: one row of a step between its reservation and its commit."""

from __future__ import annotations

from executor_service.backends.base import RowOutput
from executor_service.cache.sequence import CachedSequence
from executor_service.contract.masks import Masks
from executor_service.contract.plan import NO_TOKENS, OutputMode


class AcceptedRow:
    """A row whose pages are reserved. Its sequence's length and known tokens change only at the commit."""

    __slots__ = (
        "computed", "drafts", "end", "fed", "follows", "hit", "in_prompt", "index", "known", "left",
        "masked_later", "masks", "opened", "output", "outputs", "overwritten", "parts", "sequence", "start",
        "tokens", "top_k",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        sequence: CachedSequence,
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
        self.end = end  # KV length if all drafts are accepted and all steps taken; it is reserved
        self.known = known  # tokens known after this row, those it samples excluded
        self.output, self.top_k = output, top_k
        self.outputs = 0  # output positions
        self.drafts = NO_TOKENS
        self.masks: Masks | None = None  # [outputs, bytes], where it samples under masks
        self.masked_later = False  # its mask follows from the token of the row that it follows
        self.left = 1  # tokens still to sample
        self.tokens: list[int] = []  # sampled so far
        self.parts: list[RowOutput] = []  # one for each forward but the last, where the row has several
        self.computed = 0  # tokens computed by earlier forwards of the step
        self.overwritten = -1  # the sampled token that given tokens replaced
        self.opened = self.hit = 0  # an opening's cache id and prefix hit
        self.follows = -1  # index, in the launch before this one, of the row that samples the token fed here

    @property
    def begin(self) -> int:
        """KV length before this row; predicted, if the sequence has another row in flight."""
        return self.start - self.computed

    @property
    def predicted_known(self) -> int:
        """Tokens known after this row, those it samples included; for a row with at most one output."""
        return max(self.known, self.end) + self.outputs  # drafts with OutputMode.NONE are all kept
