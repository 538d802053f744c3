"""The pool of draft executors, whose smaller model drafts for the served model.

Drafts are token ids of the served model, sampled with the same noise, so only vocabulary and sampling rules
must be equal. An executor that differs at its first handshake is a mistake in the configuration, at which
the scheduler exits. One that differs later (another process at the same address) is refused, and decoding
goes on without drafts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from paceline.aio.executor import ExecutorClient
from paceline.channel import Security
from service_kit.logs import Log

from scheduler_service.link.executor import ExecutorLink, Timing
from scheduler_service.link.facts import ExecutorFacts
from scheduler_service.link.handshake import RefusedExecutorError
from scheduler_service.link.pool import LinkPool, owner_of
from scheduler_service.model import ServedModel, TokenizerSource

log = Log(__name__)


class DraftPool(LinkPool):
    """The draft executors at `addresses`, of which there may be none.

    `served` returns the served model, or None as long as no executor has described it.
    """

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
        """The mistake in the configuration, once `misconfigured` is set."""
        self.misconfigured = asyncio.Event()
        checks = [_VocabularyCheck(address, served, self._report) for address in addresses]
        super().__init__(
            [
                ExecutorLink(check.address, security, timing, check, changed, owner_of(instance, number))
                for number, check in enumerate(checks)
            ]
        )

    @property
    def ready(self) -> bool:
        """A draft executor can take steps."""
        return any(link.ready for link in self.links)

    def _report(self, mistake: str) -> None:
        self.mistake = self.mistake or mistake
        self.misconfigured.set()


class _VocabularyCheck:
    """The CompatibilityCheck of one draft executor: its vocabulary is the served model's.

    `report` is called with the mistake if the executor has never passed the check before.
    """

    def __init__(
        self, address: str, served: Callable[[], ServedModel | None], report: Callable[[str], None]
    ) -> None:
        self.address = address
        self._served = served
        self._report = report
        self._has_passed = False
        self._last_refusal = ""

    def check(self, facts: ExecutorFacts) -> bool:
        """False: the executor's tokenizer is not needed. Raises RefusedExecutorError."""
        model = self._served()
        if model is None:
            raise RefusedExecutorError("waiting for the served model to be described")
        vocabulary = facts.vocabulary
        if vocabulary == model.vocabulary and facts.can_sample:
            self._has_passed = True
            return False
        why = (
            f"the draft model's vocabulary ({facts.model_name}: {vocabulary}) is not "
            f"the served model's ({model.name}: {model.vocabulary})"
            if facts.can_sample
            else f"the draft model ({facts.model_name}) has a classification head in place of an output layer"
        )
        if not self._has_passed:
            self._report(f"--draft-executor {self.address}: {why}")
        elif why != self._last_refusal:
            self._last_refusal = why
            log.error("draft executor refused", address=self.address, detail=why)
        raise RefusedExecutorError(why)

    async def learn(self, facts: ExecutorFacts, tokenizer: TokenizerSource) -> None:
        """Never called: `check` asks for no tokenizer."""

    async def prepare(self, client: ExecutorClient) -> None:
        """Nothing: drafts come from the draft model as it is."""
