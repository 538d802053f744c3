"""How long requests have been waiting for an executor that takes openings."""

from __future__ import annotations

from scheduler_service.core.sequence import LiveRequest


class Patience:
    """The requests that no executor can take up at present, those that wait longest first."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since: dict[LiveRequest, float] = {}  # in this order; ended ones go when they come first

    def strand(self, live: LiveRequest, now: float) -> None:
        """It waits from now on, or has been waiting already."""
        self._since.setdefault(live, now)

    def relieve(self) -> None:
        """There is an executor: nobody waits for one."""
        self._since.clear()

    def overdue(self, now: float) -> list[LiveRequest]:
        """Those that have waited for the whole timeout; they wait no more."""
        late = []
        while (ends := self.ends()) is not None and ends <= now:
            late.append(next(iter(self._since)))
            del self._since[late[-1]]
        return late

    def ends(self) -> float | None:
        """When `overdue` next has one; None: nobody waits."""
        while self._since:
            first, since = next(iter(self._since.items()))
            if not first.ended:
                return since + self._timeout_s
            del self._since[first]
        return None
