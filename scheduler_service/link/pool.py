"""The pools of executors. In each, one executor is active, and the others stand by for failover.

The first executor that is ready becomes active, and stays so until it is lost. The first one to connect
determines the served model. One with another model or other sampling rules would continue sequences with
other tokens, and is refused. `drafts.py` has the pool of the draft executors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.aio.executor import ExecutorClient
from paceline.channel import Security
from service_kit.logs import Log

from scheduler_service.chat import formats
from scheduler_service.chat.reasoning import reasoning_markers, takes_reasoning
from scheduler_service.chat_formats import ChatFormats
from scheduler_service.link.adapters import RemoteAdapters
from scheduler_service.link.executor import ExecutorLink, Timing
from scheduler_service.link.facts import ExecutorFacts, served_model, shortcomings
from scheduler_service.link.handshake import RefusedExecutorError
from scheduler_service.link.required_adapters import WantedAdapters
from scheduler_service.model import RequestAllowance, ServedModel, TokenizerSource
from scheduler_service.text.errors import UnusableTokenizerError
from scheduler_service.text.model_text import ModelText
from scheduler_service.text.pool import TextPool

log = Log(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """The model that this scheduler serves, and its tokenizer."""

    model: ServedModel
    text: ModelText | None  # None: the model has no tokenizer, prompts are token ids
    files: TokenizerSource | None = None  # those that `text` has loaded


def owner_of(instance: str, number: int) -> str:
    """The owner of the sessions that link `number` of the scheduler `instance` opens; "" for "".

    No two links have the same owner, even if they connect to the same executor: each would end the other's
    session.
    """
    return f"{instance}#{number}" if instance else ""


class LinkPool:
    """Links to executors, of which at most one is active: its executor gets the steps."""

    def __init__(self, links: Sequence[ExecutorLink]) -> None:
        self.links = links
        self.active: ExecutorLink | None = None

    async def run(self) -> None:
        """Keep all links connected; ends only when cancelled."""
        async with asyncio.TaskGroup() as group:
            for link in self.links:
                group.create_task(link.run(), name=f"link {link.address}")

    def choose(self) -> ExecutorLink | None:
        """The active link; one that is not ready is replaced first, by a link that is and does not drain.

        None: there is no such link.
        """
        if self.active is None or not self.active.ready:
            self.active = next((link for link in self.links if link.ready and not link.draining), None)
            if self.active is not None:
                log.info("executor active", address=self.active.address)
        return self.active

    def should_leave(self, link: ExecutorLink, *, holds_caches: bool) -> bool:
        """Whether to stop using a link: it drains, and another can take over or it has none of our caches."""
        others = any(other.ready and not other.draining for other in self.links)
        return link.draining and (others or not holds_caches)

    @property
    def failure(self) -> str:
        """Why no executor can load its model, if none can; else ""."""
        failures = [link.failure for link in self.links]
        return "; ".join(failures) if all(failures) else ""

    async def close_sessions(self) -> None:
        """Close the sessions of all links."""
        await asyncio.gather(*(link.close_session("the scheduler is shutting down") for link in self.links))


class ExecutorPool(LinkPool):
    """The executors at `addresses`; `text` loads the tokenizer of the first one to connect.

    `changed` is called when an executor is ready or lost, and at each heartbeat. The pool is the
    CompatibilityCheck of its links.
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
        tool_format: str = formats.AUTO,
        adapters: WantedAdapters | None = None,
        model_name: str = "",
    ) -> None:
        """`tool_format`, `model_name`: settings of these names. `adapters`: those each executor must have."""
        super().__init__(
            [
                ExecutorLink(address, security, timing, self, changed, owner_of(instance, number))
                for number, address in enumerate(addresses)
            ]
        )
        self.served: Served | None = None
        self._formats, self._model_name = ChatFormats(tool_format), model_name
        self._adapters = WantedAdapters() if adapters is None else adapters
        self._limits = limits
        self._text = text
        self._learning = asyncio.Lock()

    def check(self, facts: ExecutorFacts) -> bool:
        """Whether the executor's tokenizer is needed: until a model is served.

        Raises RefusedExecutorError if the executor has not the served model, vocabulary and sampling rules,
        or can't do what is offered to clients.
        """
        if self.served is None:
            return True
        model = self.served.model
        found, expected = facts.fingerprints, model.fingerprints
        if found.model != expected.model:
            raise RefusedExecutorError(
                f"another model ({facts.model_name}, fingerprint {found.model.hex()[:12]}) "
                f"than the one served ({model.name}, {expected.model.hex()[:12]})"
            )
        if found.sampler != expected.sampler:
            raise RefusedExecutorError(f"other sampling rules ({found.sampler}, not {expected.sampler})")
        if expected.grammar and found.grammar != expected.grammar:
            raise RefusedExecutorError(
                f"another grammar engine ({found.grammar or 'none'}, not {expected.grammar})"
            )
        if facts.vocabulary != model.vocabulary:
            raise RefusedExecutorError(f"another vocabulary ({facts.vocabulary}, not {model.vocabulary})")
        if lacking := shortcomings(facts, model):
            raise RefusedExecutorError(f"it can't do what the service offers ({'; '.join(lacking)})")
        return False

    async def learn(self, facts: ExecutorFacts, tokenizer: TokenizerSource) -> None:
        """Serve this executor's model from now on, unless one is served meanwhile: then only `check` it.

        Raises RefusedExecutorError if the tokenizer can't be used, ValueError if the model can't be served.
        """
        async with self._learning:
            if not self.check(facts):
                return
            model = served_model(facts, tokenizer, self._limits)
            model = replace(model, name=self._model_name or model.name)
            try:
                text = await ModelText.made_of(tokenizer, self._text, model.vocab_size, self._formats.markers)
            except UnusableTokenizerError as error:
                raise RefusedExecutorError(f"its tokenizer can't be used: {error}") from error
            if text is not None and text.has_chat_template:
                model = self._with_chat_output(model, tokenizer.chat_template, text.added)
            self.served = Served(model, text, tokenizer if text else None)

    async def prepare(self, client: ExecutorClient) -> None:
        """Load the adapters that are wanted. Raises RefusedExecutorError, PacelineError, ValueError."""
        if self.served is not None and self.served.model.name in self._adapters.from_start:
            raise RefusedExecutorError(f"adapter {self.served.model.name}: the name is the model's own")
        await RemoteAdapters(client).bring(self._adapters)

    def _with_chat_output(self, model: ServedModel, template: str, added: Mapping[str, int]) -> ServedModel:
        """The model with what its chat template and its added tokens say of its output."""
        tool_format = self._formats.format_of(template, added)
        whole_format = formats.whole_format_of(template, added, self._formats.setting)
        reasoning = reasoning_markers(template, added) if whole_format is None else None
        model = replace(
            model,
            tool_format=tool_format,
            reasoning=reasoning,
            whole_format=whole_format,
            takes_reasoning=takes_reasoning(template),
        )
        log.info(
            "chat output",
            tool_format="none" if tool_format is None else tool_format.name,
            template_takes_tools=formats.takes_tools(template),
            reasoning=model.reasons,
        )
        return model
