"""Requests that no connected executor can open caches for, and since when."""

from __future__ import annotations

from scheduler_service.core.sequence import LiveRequest

MIN_PRUNED = 64
"""Requests, ended ones included, from which on ended ones are looked for."""


class StrandedRequests:
    """The requests that no executor can open caches for at present, in the order in which they became so."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since: dict[LiveRequest, float] = {}  # in this order; some of them may have ended
        self._prune_at = MIN_PRUNED

    def strand(self, live: LiveRequest, now: float) -> None:
        """Add a request; no change if it is here already."""
        self._since.setdefault(live, now)
        if len(self._since) >= self._prune_at:
            self._since = {one: since for one, since in self._since.items() if not one.ended}
            self._prune_at = max(MIN_PRUNED, 2 * len(self._since))

    def relieve(self) -> None:
        """Remove all requests: there is an executor."""
        self._since.clear()
        self._prune_at = MIN_PRUNED

    def overdue(self, now: float) -> list[LiveRequest]:
        """Remove and return the requests that have been here for the whole timeout."""
        late = []
        while (ends := self.ends()) is not None and ends <= now:
            late.append(next(iter(self._since)))
            del self._since[late[-1]]
        return late

    def ends(self) -> float | None:
        """When `overdue` next returns a request; None if there is none."""
        while self._since:
            first, since = next(iter(self._since.items()))
            if not first.ended:
                return since + self._timeout_s
            del self._since[first]
        return None
