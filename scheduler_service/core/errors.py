"""What the core raises.

CoreError
├── AdmissionError        a request was not taken; nothing has changed
│   ├── NeverFits         names the field: INVALID_ARGUMENT
│   ├── IdInUse           its id is live: ALREADY_EXISTS
│   ├── NoRoom            with a retry time: RESOURCE_EXHAUSTED
│   │   ├── QuotaUsed     by the identity's own requests: others have room
│   │   └── TooLate       its deadline can't be met as things are
│   └── NotReady          no executor was ever seen, so no limits are known: UNAVAILABLE
├── IllegalEvent          a state machine was driven wrongly: a bug, nothing has changed
└── UnknownStep           a result for no step that is in flight; nothing has changed
"""

from __future__ import annotations


class CoreError(Exception):
    """The root of all that the core raises."""


class AdmissionError(CoreError):
    """A request was not taken; nothing has changed."""


class NeverFits(AdmissionError):
    """The request can't run on this executor, however long it waits."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


class IdInUse(AdmissionError):
    """A live request has this id."""


class NoRoom(AdmissionError):
    """A bound of the queue is reached, in requests or in tokens."""

    def __init__(self, message: str, retry_after_s: float, identity: str = "", limit: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s  # predicted wait of those that are queued now
        self.identity = identity  # whose bound it is; empty: the bound of all identities together
        self.limit = limit  # "queued requests", "queued tokens" or "deadline"


class QuotaUsed(NoRoom):
    """The identity's share of the queue is used up."""


class TooLate(NoRoom):
    """Predicted to miss its deadline."""


class NotReady(AdmissionError):
    """No executor has been seen yet, so no limits are known."""


class IllegalEvent(CoreError):
    """An event that the state does not allow. Nothing has changed."""


class UnknownStep(CoreError):
    """A result that answers no step in flight, or not in order. Nothing has changed."""
