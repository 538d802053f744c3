"""The stacks of a fleet, as they report themselves each second: who is there, where, and why not. Pure.

Stacks learn from it to whom they announce themselves, and which token is theirs. What is lost with it, the
next reports bring back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

GONE_S = 6.0
"""Time without a report after which a stack is taken for gone, and its slot is free."""
SETTLE_S = 3.0
"""Time after the roster's start in which it gives no slots: stacks that have one report it first."""
MAX_ENDED = 32
MAX_LINES = 1000


@dataclass(frozen=True, slots=True)
class StackReport:
    """What a stack says of itself. `reason`: what it is doing or waits for, or why it failed."""

    stack: str  # the replica's id
    model: str
    version: str  # of its settings
    node: str  # the node's id
    host: str
    pid: int  # of the stack's actor
    state: str = "starting"  # or the scheduler's, or failed
    reason: str = ""
    address: str = ""
    tls_name: str = ""
    slot: int = -1
    running: int = 0
    waiting: int = 0
    wait_s: float = 0.0
    restarts: int = 0  # of its processes, by the supervisor
    processes: Mapping[str, int] = field(default_factory=dict)  # their ids by service

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> StackReport:
        """A report as it came; fields that another version has are dropped."""
        return cls(**{name: value for name, value in given.items() if name in cls.__slots__})


class Roster:
    """Reports by stack; `slots`: how many tokens there are for stacks."""

    def __init__(self, slots: int, now: float) -> None:
        self.slots = slots
        self._settled_at = now + SETTLE_S
        self._live: dict[str, tuple[StackReport, float]] = {}
        self._ended: deque[StackReport] = deque(maxlen=MAX_ENDED)
        self._lines: deque[tuple[str, str]] = deque(maxlen=MAX_LINES)

    def report(self, report: StackReport, lines: Sequence[str], now: float) -> dict[str, Any]:
        """Take a stack's report and new log lines; returns its slot, and whom it announces itself to.

        `replaces`: whether some of these have other settings, as in an update.
        """
        self._lines.extend((report.stack, line) for line in lines)
        self.expire(now)
        if report.state in ("failed", "ended"):
            self._live.pop(report.stack, None)
            self._ended.append(report)
            return {"slot": report.slot, "others": [], "replaces": False}
        taken = {one.slot for one, _ in self._live.values() if one.stack != report.stack}
        if report.slot in taken:  # given twice, by two rosters: the later one gets another
            report = replace(report, slot=-1)
        if report.slot < 0 and now >= self._settled_at:
            free = [slot for slot in range(self.slots) if slot not in taken]
            report = replace(report, slot=free[0] if free else -1)
        self._live[report.stack] = (report, now)
        others = [
            one
            for one, _ in self._live.values()
            if one.stack != report.stack and one.address and one.model == report.model
        ]
        return {
            "slot": report.slot,
            "others": [(one.address, one.tls_name) for one in others],
            "replaces": any(one.version != report.version for one in others),
        }

    def expire(self, now: float) -> None:
        """Move stacks that report no more to those that ended."""
        for stack, (report, at) in list(self._live.items()):
            if now - at > GONE_S:
                del self._live[stack]
                self._ended.append(replace(report, state="lost", reason="it reports no more"))

    def listing(self, now: float) -> dict[str, Any]:
        """All that is known, as plain values: live stacks with the age of their reports, and ended ones."""
        self.expire(now)
        live = [{**asdict(report), "age_s": now - at} for report, at in self._live.values()]
        return {"stacks": live, "ended": [asdict(report) for report in self._ended]}

    def lines(self, stack: str = "") -> list[tuple[str, str]]:
        """The newest log lines of all stacks, or of those whose id begins so."""
        return [line for line in self._lines if line[0].startswith(stack)]
