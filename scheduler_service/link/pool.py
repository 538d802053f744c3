"""All executors on the command line: one is active, the others stand by for failover.

The first that is ready becomes active and stays so until it is lost. What the first one said about
its model holds from then on: an executor of another model, or with other sampling rules, would go
on with other tokens, and is refused. (The pool is its links' doorkeeper.) `drafts.py` has the pool of
the executors that draft.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.channel import Security
from paceline.service.logs import Log

from scheduler_service.link.executor import ExecutorLink, RefusedExecutorError, Timing
from scheduler_service.link.facts import ExecutorFacts, served_model
from scheduler_service.model import RequestAllowance, ServedModel, TokenizerSource
from scheduler_service.text.errors import UnusableTokenizerError
from scheduler_service.text.pool import TextPool
from scheduler_service.text.tools import TextTools

log = Log(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """What this scheduler serves, known since its first executor."""

    model: ServedModel
    text: TextTools | None  # None: the model has no tokenizer, prompts are token ids
    files: TokenizerSource | None = None  # what `text` is made of


def owner_of(instance: str, number: int) -> str:
    """The name under which the scheduler `instance` owns the sessions of its link `number`; "" for "".

    Two links never have the same one, even to the same executor: each would end the other's session.
    """
    return f"{instance}#{number}" if instance else ""


class LinkPool:
    """Links of which one is driven at a time."""

    def __init__(self, links: Sequence[ExecutorLink]) -> None:
        self.links = links
        self.active: ExecutorLink | None = None

    async def run(self) -> None:
        """Keep all links greeted; ends only when cancelled."""
        async with asyncio.TaskGroup() as group:
            for link in self.links:
                group.create_task(link.run(), name=f"link {link.address}")

    def choose(self) -> ExecutorLink | None:
        """The one to drive from now on: the active one while it lasts, else the next that takes openings."""
        if self.active is None or not self.active.ready:
            self.active = next((link for link in self.links if link.ready and not link.retiring), None)
            if self.active is not None:
                log.info("executor active", address=self.active.address)
        return self.active

    def should_leave(self, link: ExecutorLink, *, holds_caches: bool) -> bool:
        """It drains, and another one is ready, or nothing of ours is left on it."""
        others = any(other.ready and not other.retiring for other in self.links)
        return link.retiring and (others or not holds_caches)

    async def leave(self) -> None:
        """Give all sessions back."""
        await asyncio.gather(*(link.leave("the scheduler is shutting down") for link in self.links))


class ExecutorPool(LinkPool):
    """The executors at `addresses`; `text` loads the first one's tokenizer.

    `changed` is called when one is ready or lost, and at heartbeats.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        security: Security,
        timing: Timing,
        limits: RequestAllowance,
        text: TextPool,
        changed: Callable[[], None],
        instance: str = "",
    ) -> None:
        super().__init__(
            [
                ExecutorLink(address, security, timing, self, changed, owner_of(instance, number))
                for number, address in enumerate(addresses)
            ]
        )
        self.served: Served | None = None
        self._limits = limits
        self._text = text
        self._learning = asyncio.Lock()

    def check(self, facts: ExecutorFacts) -> bool:
        """Whether its tokenizer is needed: only the first one's. Raises RefusedExecutorError."""
        if self.served is None:
            return True
        theirs, expected = facts.fingerprints, self.served.model.fingerprints
        if theirs.model != expected.model:
            raise RefusedExecutorError(
                f"another model ({facts.model_name}, fingerprint {theirs.model.hex()[:12]}) "
                f"than the one served ({self.served.model.name}, {expected.model.hex()[:12]})"
            )
        if theirs.sampler != expected.sampler:
            raise RefusedExecutorError(f"other sampling rules ({theirs.sampler}, not {expected.sampler})")
        vocabulary, known = facts.vocabulary, self.served.model.vocabulary
        if vocabulary != known:
            raise RefusedExecutorError(f"another vocabulary ({vocabulary}, not {known})")
        return False

    async def learn(self, facts: ExecutorFacts, tokenizer: TokenizerSource) -> None:
        """What is served from now on, unless another executor was faster. Raises RefusedExecutorError."""
        async with self._learning:
            if not self.check(facts):
                return
            model = served_model(facts, tokenizer, self._limits)
            try:
                text = await TextTools.made_of(tokenizer, self._text)
            except UnusableTokenizerError as error:
                raise RefusedExecutorError(f"its tokenizer can't be used: {error}") from error
            self.served = Served(model, text, tokenizer if text else None)
