"""`ReplyRules`: which reply a FakeScheduler gives to which prompt."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, replace

from paceline.testing.replies import FakeLoss, FakeReply


@dataclass(slots=True)
class _Rule:
    """One reply. `left`: number of calls that it still answers; None: any number."""

    reply: FakeReply
    pattern: re.Pattern[str] | None
    left: int | None


class ReplyRules:
    """Replies in the order in which they were given. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._lost: dict[
            str, tuple[FakeReply, int]
        ] = {}  # by request id: its reply, and attempts lost so far

    def add(self, reply: FakeReply, pattern: str | None, times: int | None) -> None:
        """Add a reply after the others. Raises ValueError if it could never be given."""
        if times is not None and times < 1:
            raise ValueError(f"times {times} is less than 1")
        try:
            compiled = None if pattern is None else re.compile(pattern)
        except re.error as error:
            raise ValueError(f"to {pattern!r} is not a regular expression: {error}") from error
        with self._lock:
            if any(rule.pattern is None and rule.left is None for rule in self._rules):
                raise ValueError(
                    "an earlier reply answers every call, so this one is never given: tell that one times= or"
                    " to=, or forget() it"
                )
            self._rules.append(_Rule(reply, compiled, times))

    def forget(self) -> None:
        """Drop all replies."""
        with self._lock:
            self._rules.clear()
            self._lost.clear()

    def take(self, prompt: str, request_id: str) -> FakeReply | None:
        """The reply to a call, of the first rule that fits and is not used up; None: there is none.

        A request that was lost and comes again gets the reply that it had.
        """
        with self._lock:
            reply, losses = self._lost.pop(request_id, (None, 0))
            reply = reply or self._next(prompt)
            if reply is None or not isinstance(reply.fault, FakeLoss):
                return reply
            if losses == reply.fault.times:
                return replace(reply, fault=None)
            self._lost[request_id] = reply, losses + 1
            return reply

    def _next(self, prompt: str) -> FakeReply | None:
        for rule in self._rules:
            if rule.left != 0 and (rule.pattern is None or rule.pattern.search(prompt)):
                if rule.left is not None:
                    rule.left -= 1
                return rule.reply
        return None
