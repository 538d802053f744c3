"""`GrammarChecks`: grammars are compiled by the executor before their requests are queued."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from weakref import WeakValueDictionary

from service_kit.identity import Identity

from scheduler_service.core.request import OutputGrammar
from scheduler_service.errors import RETRY_AFTER_S, ErrorReason, ServiceError, invalid
from scheduler_service.link.executor import ExecutorLink

MAX_CHECKS = 2
"""Grammars of one identity that are checked at once; others wait. One takes at most 0.5 s of CPU time."""

MAX_WAIT_S = 10.0
"""Maximum seconds to wait for a turn. Grammars that are not hostile take milliseconds, but the process that
compiles them may have to start."""

_TIMEOUT_S = 30.0  # on a busy machine the process that compiles it may have to start first


class GrammarChecks:
    """Asks the active executor, which keeps what it has compiled for the opening that follows."""

    def __init__(self, active: Callable[[], ExecutorLink | None], max_wait_s: float = MAX_WAIT_S) -> None:
        self._active, self._max_wait_s = active, max_wait_s
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def check(
        self, grammar: OutputGrammar, caller: Identity, deadline: float | None, field: str = "grammar"
    ) -> tuple[str, ...]:
        """Warnings: parts of the grammar that have no effect.

        Raises ServiceError if the grammar can't be compiled, or if the caller has too many in check.

        `deadline`: of the call, by time.monotonic.

        `field`: that of the request which the grammar was made of.

        Without an executor nothing is checked: then the opening is refused.
        """
        turns = self._turns.get(caller.name)
        if turns is None:
            turns = self._turns[caller.name] = asyncio.Semaphore(MAX_CHECKS)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await turns.acquire()
        except TimeoutError:
            raise ServiceError(
                ErrorReason.QUOTA,
                f"{caller.name}: {MAX_CHECKS} grammars are checked at once, and these take long",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        try:
            link = self._active()
            if link is None:
                return ()
            timeout_s = _TIMEOUT_S if deadline is None else min(_TIMEOUT_S, deadline - time.monotonic())
            try:
                answer = await link.check_grammar(grammar, max(timeout_s, 0.001))
            except TimeoutError:
                raise ServiceError(
                    ErrorReason.NOT_READY,
                    "the grammar could not be checked in time",
                    retry_after_s=RETRY_AFTER_S,
                ) from None
        finally:
            turns.release()
        if isinstance(answer, str):
            found, _, problem = answer.partition(": ")
            if field != "grammar" or not problem:
                raise invalid(field, problem or answer)
            raise invalid(found, problem)
        return answer
