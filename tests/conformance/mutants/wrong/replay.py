"""The order of steps, and replays: caught by test_replay.py."""

from __future__ import annotations

from typing import Any

from executor_service.cache.session import ClientSession
from executor_service.rpc.codec import steps
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def replay_applies_twice() -> None:
    """a replayed step is done again"""

    def replay(original: Any, self: ClientSession, plan: Any) -> Any:
        original(self, plan)

    wrap(ClientSession, "replay", replay)


@mutant()
def gaps_are_let_through() -> None:
    """a step is done although one before it is missing"""

    def replay(original: Any, self: ClientSession, plan: Any) -> Any:
        if plan.step_id > self.last_step_id:
            return None
        return original(self, plan)

    wrap(ClientSession, "replay", replay)


@mutant()
def a_span_is_content() -> None:
    """a replay with another traceparent is taken for another step"""

    def digest(original: Any, message: Any, header: Any) -> Any:
        return header.traceparent.encode() + original(message, header)

    wrap(steps, "digest", digest)
