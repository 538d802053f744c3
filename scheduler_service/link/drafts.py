"""The draft executors, whose smaller model drafts for the served one; one is active at a time.

Drafts are token ids of the served model, sampled with the same noise, so only vocabulary and sampling rules
must be equal. An executor that differs at its first handshake is a mistake in the configuration: `mistaken`
is set, and the scheduler exits. One that differs later (another process at the same address) is refused, and
decoding goes on without drafts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from paceline.channel import Security
from paceline.service.logs import Log

from scheduler_service.link.executor import ExecutorLink, RefusedExecutorError, Timing
from scheduler_service.link.facts import ExecutorFacts
from scheduler_service.link.pool import LinkPool, owner_of
from scheduler_service.model import ServedModel, TokenizerSource

log = Log(__name__)


class DraftPool(LinkPool):
    """The draft executors at `addresses`, which may be none. `served` tells the model, once it is known."""

    def __init__(
        self,
        addresses: Sequence[str],
        security: Security,
        timing: Timing,
        served: Callable[[], ServedModel | None],
        changed: Callable[[], None],
        instance: str = "",
    ) -> None:
        self.mistake = ""
        """Why this scheduler must not go on with the draft executors that it was given."""
        self.mistaken = asyncio.Event()
        doors = [_Door(address, served, self._complain) for address in addresses]
        super().__init__(
            [
                ExecutorLink(door.address, security, timing, door, changed, owner_of(instance, number))
                for number, door in enumerate(doors)
            ]
        )

    def _complain(self, mistake: str) -> None:
        self.mistake = self.mistake or mistake
        self.mistaken.set()


class _Door:
    """Lets one draft executor in if it speaks the served model's token ids."""

    def __init__(
        self, address: str, served: Callable[[], ServedModel | None], complain: Callable[[str], None]
    ) -> None:
        self.address = address
        self._served = served
        self._complain = complain
        self._met = False
        self._last_refusal = ""

    def check(self, facts: ExecutorFacts) -> bool:
        """Its tokenizer is never needed. Raises RefusedExecutorError if it won't do."""
        model = self._served()
        if model is None:
            raise RefusedExecutorError("waiting to know the model that it drafts for")
        vocabulary = facts.vocabulary
        if vocabulary == model.vocabulary:
            self._met = True
            return False
        why = (
            f"the draft model's vocabulary ({facts.model_name}: {vocabulary}) is not "
            f"the served model's ({model.name}: {model.vocabulary})"
        )
        if not self._met:
            self._complain(f"--draft-executor {self.address}: {why}")
        elif why != self._last_refusal:
            self._last_refusal = why
            log.error("draft executor refused", address=self.address, detail=why)
        raise RefusedExecutorError(why)

    async def learn(self, facts: ExecutorFacts, tokenizer: TokenizerSource) -> None:
        """Nothing is."""
