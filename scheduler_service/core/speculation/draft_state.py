"""What speculation knows of one sequence: its drafters, the drafts it has, and how they did."""

from __future__ import annotations

from scheduler_service.core.request import DraftSource
from scheduler_service.core.speculation.drafters import ExecutorDrafter, NgramDrafter


class DraftState:
    """A sequence's speculation; a sequence without one decodes plainly."""

    __slots__ = (
        "_accepted",
        "_drafted",
        "decided_at",
        "drafts",
        "executor",
        "known",
        "length",
        "losses",
        "maker",
        "ngram",
        "plain_until",
        "promise",
        "sent",
        "since",
        "wanted",
    )

    def __init__(
        self, length: int | None, ngram: NgramDrafter | None, executor: ExecutorDrafter | None
    ) -> None:
        self.length = length  # fixed number of drafts; None: the controller decides
        self.ngram = ngram
        self.executor = executor
        self.decided_at = -1  # known tokens at the last decision: there is one per step
        self.plain_until = 0  # no drafts until so many tokens are known
        self.losses = 0  # draft executors lost while they computed it, since they last answered
        # asked of the draft executor, while the sequence waits
        self.wanted = 0
        self.promise = 1.0  # tokens that its next verification is expected to bring
        self.since = 0.0
        # there to be verified
        self.drafts: tuple[int, ...] = ()
        self.known = 0  # they follow so many known tokens
        self.maker = DraftSource.NGRAM
        self.sent: DraftSource | None = None  # who made those of the row in flight
        # verifications, by the number of drafts and by how many of them were accepted
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def retire(self) -> None:
        """The sequence has ended: let go of what only a live one needs, and keep what its usage tells.

        An ended request is a cycle, which the collector finds late; the index is most of its size.
        """
        self.ngram = self.executor = None
        self.drafts = ()

    def offer(self, drafts: tuple[int, ...], known: int, maker: DraftSource) -> None:
        """These drafts follow the first `known` tokens."""
        self.drafts, self.known, self.maker = drafts, known, maker

    def keep(self, tokens: list[int]) -> None:
        """Of the draft executor's drafts keep those that may still follow `tokens`."""
        passed = len(tokens) - self.known
        if self.maker is DraftSource.EXECUTOR and tuple(tokens[self.known :]) == self.drafts[:passed]:
            self.offer(self.drafts[passed:], len(tokens), self.maker)
        else:
            self.drafts = ()

    def verified(self, drafted: int, accepted: int) -> None:
        """A verification of `drafted` drafts accepted the first `accepted`."""
        _count(self._drafted, drafted)
        _count(self._accepted, accepted)
        if self.sent is DraftSource.EXECUTOR and self.executor is not None:
            self.executor.verified(drafted, accepted)

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
