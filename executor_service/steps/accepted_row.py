"""`AcceptedRow`: one row of a step between its reservation and its commit."""

from __future__ import annotations

from executor_service.backends.base import RowOutput
from executor_service.cache.sequence import CachedSequence, HiddenSum
from executor_service.contract.masks import Masks
from executor_service.contract.plan import NO_TOKENS, OutputMode, TokenScores

_HIDDEN, _SAMPLE = OutputMode.HIDDEN, OutputMode.SAMPLE


class AcceptedRow:
    """A row whose pages are reserved. Its sequence's length and known tokens change only at the commit."""

    __slots__ = (
        "begin", "drafts", "end", "fed", "follows", "hidden_sum", "hit", "in_prompt", "index", "known",
        "left", "masked_later", "masks", "opened", "output", "outputs", "overwritten", "parts", "scores",
        "sequence", "slack", "start", "tokens", "top_k", "with_prompt",
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
        self.begin = start  # KV length before this row; predicted, if the sequence has another row in flight
        self.start = start  # of the next forward
        self.in_prompt = start < sequence.prompt_length  # it computes prompt tokens
        self.fed = fed  # tokens in the next forward, drafts included
        self.end = end  # KV length if all drafts are accepted and all steps taken; it is reserved
        self.known = known  # tokens known after this row, those it samples excluded
        self.output, self.top_k = output, top_k
        self.outputs = 0  # output positions
        self.drafts = NO_TOKENS
        self.masks: Masks | None = None  # [outputs, bytes], where it samples under masks
        self.masked_later = False  # its masks follow from the tokens of the row that it follows
        self.left = 1  # tokens still to sample
        self.tokens: list[int] = []  # sampled so far
        self.parts: list[RowOutput] = []  # one for each forward but the last, where the row has several
        self.overwritten = -1  # the sampled token that given tokens replaced
        self.opened = self.hit = 0  # an opening's cache id and prefix hit
        # Whether its sequence's opening asks for scores or for a vector.
        self.with_prompt = bool(sequence.scored) or output is _HIDDEN or sequence.hidden_sum is not None
        self.scores: list[TokenScores] = []  # by forwards but the last, as is the next
        self.hidden_sum: HiddenSum | None = None
        self.follows = -1  # index, in the launch before this one, of the row that samples the token fed here
        # Unverified drafts of that row: `start`, `end` and `known` are as if all of these were accepted.
        self.slack = 0

    @property
    def computed(self) -> int:
        """Tokens computed by earlier forwards of the step."""
        return self.start - self.begin

    @property
    def open_drafts(self) -> int:
        """Drafts of a row in flight, by which the KV length after it may be lower than `end`."""
        return len(self.drafts) if self.output is _SAMPLE else 0  # else all are kept

    @property
    def max_known(self) -> int:
        """Tokens known after this row at most; those it samples are included."""
        return max(self.known, self.end) + (self.outputs > 0)

    def begin_at(self, start: int) -> None:
        """Its start is known now: the row that it follows has accepted fewer drafts than it had."""
        late = self.start - start
        self.begin = self.start = start
        self.end, self.known, self.slack = self.end - late, self.known - late, 0
        self.sequence.ids[self.known : self.known + len(self.drafts)] = self.drafts

    def drop_drafts(self, kept: int) -> None:
        """Verify the first `kept` drafts alone."""
        dropped = len(self.drafts) - kept
        self.drafts = self.drafts[:kept]
        self.fed, self.end, self.outputs = self.fed - dropped, self.end - dropped, self.outputs - dropped

    def finite_length(self, length: int) -> int:
        """Of the KV length `length` after this row, how much is finite if what the row returns is.

        Output positions, and positions whose logits give a score, have attended to all before them.
        """
        if self.outputs:
            return length
        scored = self.sequence.scored
        finite = min(length, scored.stop - 1)
        return finite if finite >= scored.start and finite > self.begin else 0

    def keep(self, output: RowOutput) -> None:
        """Keep what a forward, not the row's last, returned of the prompt."""
        if output.scores is not None:
            self.scores.append(output.scores)
        if output.hidden_sum is not None:
            self.hidden_sum = (
                output.hidden_sum if self.hidden_sum is None else self.hidden_sum + output.hidden_sum
            )


def scored_by(scored: range, start: int, end: int) -> range:
    """Of the tokens at `scored`, those whose scores come from the positions start .. end - 1."""
    return range(max(start + 1, scored.start), min(end + 1, scored.stop))
