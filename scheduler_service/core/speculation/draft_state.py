"""The speculation of one sequence: its drafters, its present drafts, and how many drafts were accepted."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_service.core.request import DraftSource
from scheduler_service.core.speculation.drafters import ExecutorDrafter, GrammarDrafter, NgramDrafter

FREE_TOKENS = 16
"""Tokens without a promising candidate after which a sequence begins to rest."""


class DraftState:
    """A sequence's speculation; a sequence without one decodes plainly."""

    __slots__ = (
        "_accepted",
        "_drafted",
        "ahead_at",
        "decided_at",
        "decided_with",
        "drafts",
        "executor",
        "grammar",
        "grammar_accepted",
        "grammar_drafted",
        "index_stride",
        "length",
        "losses",
        "maker",
        "ngram",
        "offered_at",
        "plain_until",
        "promise",
        "promising_at",
        "sent",
        "since",
        "wanted",
    )

    def __init__(
        self,
        length: int | None,
        executor: ExecutorDrafter | None,
        grammar: GrammarDrafter | None,
        input_length: int,
    ) -> None:
        """input_length: tokens of the sequence's input; those after it are output."""
        self.length = length  # fixed number of drafts; None: the controller decides
        self.ngram: NgramDrafter | None = None  # made when the sequence is opened, if it was asked for
        self.executor = executor
        self.grammar = grammar
        # The last decision: there is one for each number of tokens at which there may be a row, and once more
        # when other tokens are known by then.
        self.decided_at = -1  # tokens that the row would follow, if all unanswered drafts are accepted
        self.decided_with = -1  # known tokens
        self.ahead_at = -1  # as `decided_at`: the row need not wait for answers
        self.plain_until = 0  # no drafts until this number of tokens is known
        self.index_stride = 1  # of the next update of the n-gram index
        self.promising_at = input_length  # known tokens at the last decision that had a promising candidate
        self.losses = 0  # draft executors lost while they computed it, since they last answered
        # asked of the draft executor, while the sequence waits
        self.wanted = 0
        self.promise = 1.0  # tokens that its next verification is expected to bring
        self.since = 0.0
        # there to be verified
        self.drafts: tuple[int, ...] = ()
        self.offered_at = 0  # tokens that they follow, as of `decided_at`; stays when they are gone
        self.maker = DraftSource.NGRAM
        self.sent: DraftSource | None = None  # source of the drafts in the row that was sent last
        # verifications, by the number of drafts and by how many of them were accepted
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        self.grammar_drafted = self.grammar_accepted = 0  # tokens that the grammar forced

    def retire(self) -> None:
        """The sequence has ended: drop its drafters and drafts, and keep the counts for its usage.

        An ended request is a reference cycle, which is collected late; the index is most of its size.
        """
        self.ngram = self.executor = self.grammar = None
        self.drafts = ()

    def offer(self, drafts: tuple[int, ...], known: int, maker: DraftSource) -> None:
        """These drafts follow the first `known` tokens, if all unanswered drafts are accepted."""
        self.drafts, self.offered_at, self.maker = drafts, known, maker

    def rest(self, least: int, most: int, phase: int) -> int:
        """The last decision gave no drafts: decode plainly for a while before the next one.

        With p tokens decoded since the last promising decision (or since the input's end), the rest is
        p - FREE_TOKENS, at least `least` and at most `most` tokens. So a text that starts to repeat
        after p such tokens is decided about at most that much later than without rests.
        phase: shortens a rest by up to a quarter, so that sequences that began together do not stay together.
        Returns the tokens of the rest.
        """
        rest = self.decided_at - self.promising_at - FREE_TOKENS
        if rest > most:
            rest = most
        if rest > 3:
            rest -= phase % (rest // 4 + 1)
        if rest < least:
            rest = least
        self.plain_until = self.decided_at + rest
        return rest

    def decide_again(self) -> None:
        """The next decision is about this sequence, although it has no new token."""
        self.decided_at = -1

    def keep(self, tokens: Sequence[int]) -> None:
        """Of the draft executor's drafts keep those that may still follow `tokens`."""
        passed = len(tokens) - self.offered_at
        if self.maker is DraftSource.EXECUTOR and tuple(tokens[self.offered_at :]) == self.drafts[:passed]:
            self.offer(self.drafts[passed:], len(tokens), self.maker)
        else:
            self.drafts = ()

    def verified(self, source: DraftSource, drafted: int, accepted: int) -> None:
        """A verification of `drafted` drafts from `source` accepted the first `accepted`."""
        _count(self._drafted, drafted)
        _count(self._accepted, accepted)
        if source is DraftSource.EXECUTOR and self.executor is not None:
            self.executor.verified(drafted, accepted)
        elif source is DraftSource.GRAMMAR and self.grammar is not None:
            self.grammar.verified(drafted, accepted)
            self.grammar_drafted += drafted
            self.grammar_accepted += accepted

    @property
    def verifications(self) -> int:
        """Answered rows that had drafts."""
        return sum(self._drafted)

    @property
    def drafted_by_position(self) -> tuple[int, ...]:
        """[i]: verifications with more than i drafts."""
        return _beyond(self._drafted)

    @property
    def accepted_by_position(self) -> tuple[int, ...]:
        """[i]: verifications that accepted more than i drafts; as long as `drafted_by_position`."""
        short = _beyond(self._accepted)
        return short + (0,) * (len(self._drafted) - 1 - len(short))


def _count(histogram: list[int], value: int) -> None:
    while len(histogram) <= value:
        histogram.append(0)
    histogram[value] += 1


def _beyond(histogram: list[int]) -> tuple[int, ...]:
    """[i]: how many counted values are above i."""
    return tuple(sum(histogram[i + 1 :]) for i in range(len(histogram) - 1))
