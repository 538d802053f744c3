"""One identity's account: its weight, the service that it has received, its requests and sequences."""

from __future__ import annotations

from scheduler_service.core.lengths import Lengths
from scheduler_service.core.waiting.wait import AccountWaits

OWN_LENGTHS = 32
"""Completions from which an identity's own lengths are estimated."""


class Account:
    """The account of one identity. It is *active* while a request of the identity has not ended."""

    __slots__ = (
        "counter",
        "identity",
        "lengths",
        "queued_requests",
        "queued_tokens",
        "rank",
        "refused",
        "requests",
        "running",
        "taken",
        "taken_at",
        "tokens",
        "version",
        "waits",
        "weight",
    )

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.weight = 1.0
        self.counter = 0.0  # virtual tokens: service so far, divided by the weight
        self.rank = 0  # rises each time that an account becomes active
        self.version = 0  # of its entry in `FairQueue`'s heap
        self.requests = 0  # that have not ended
        self.running = 0  # sequences with a cache
        self.queued_requests = 0  # not started yet
        self.queued_tokens = 0  # prompt tokens of the queued requests
        self.taken_at = 0.0  # when its last request was taken
        self.lengths = Lengths(OWN_LENGTHS)
        self.waits = AccountWaits()
        # for metrics: totals since the account was made
        self.taken = 0  # requests
        self.refused = 0
        self.tokens = 0  # virtual tokens, not divided by the weight
