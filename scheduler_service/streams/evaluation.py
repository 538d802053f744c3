"""A call that evaluates its inputs: what it asks of the core, and what has come back so far."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from service_kit.identity import Identity

from scheduler_service.core.evaluation import Evaluation
from scheduler_service.core.events import CompletionEnded, CompletionUsage, PromptScores, PromptVector
from scheduler_service.core.request import Phases, Request, SamplingSettings
from scheduler_service.core.step import ScoredTokens
from scheduler_service.errors import ServiceError
from scheduler_service.model import ServedAdapter
from scheduler_service.streams.request import scoped_id
from scheduler_service.traced_call import TracedCall


@dataclass(frozen=True, slots=True)
class EvaluationCall:
    """What all evaluations have in common, with all fields within their limits."""

    id: str  # the caller's, or a random one
    priority: int
    salt: bytes
    digest: bytes  # of method and request; empty with a random id, under which no resend can come
    adapter: ServedAdapter | None = None  # None: the model as it is
    method: str = ""  # that was called: Score, Embed, Rerank
    model: str = ""  # name of the model, or of the adapter
    labels: Mapping[str, str] = field(default_factory=dict)  # for the log, and for who asks why it waits

    def to_core(
        self,
        evaluation: Evaluation,
        alternatives: int,
        caller: Identity,
        *,
        arrival: float,
        deadline: float | None,
        phases: Phases = (),
    ) -> Request:
        """The core's request. alternatives: to each scored token; times in seconds on the core's clock."""
        return Request(
            id=scoped_id(caller.name, self.id),
            prompt=(),
            sampling=SamplingSettings(),
            n=len(evaluation.inputs),
            priority=self.priority,
            arrival=arrival,
            deadline=deadline,
            salt=self.salt,
            adapter=self.adapter.fingerprint if self.adapter else b"",
            identity=caller.name,
            weight=caller.weight,
            prompt_logprobs=alternatives,
            evaluation=evaluation,
            phases=phases,
            labels=self.labels,
        )


@dataclass(slots=True)
class EvaluatedInput:
    """What has come back of one input."""

    scores: list[ScoredTokens] = field(default_factory=list)  # consecutive
    vector: bytes = b""  # fp32, little-endian
    usage: CompletionUsage | None = None  # None: it is not done

    @property
    def logprobs(self) -> list[float]:
        """Of its scored tokens."""
        return [logprob for part in self.scores for logprob in part.logprobs]


class EvaluationStream:
    """The evaluation of one live call, from its admission on. The client gets one reply, at its end."""

    def __init__(
        self, call: EvaluationCall, core_id: str, identity: str, arrival: float, inputs: int
    ) -> None:
        self.request_id = call.id  # the caller's; two callers may use the same one
        self.method, self.model, self.labels = call.method, call.model, call.labels
        self.operation = "embeddings" if call.method == "Embed" else call.method.lower()
        self.prompt_tokens = 0  # of all inputs
        self.core_id = core_id  # the core's, unique
        self.identity = identity  # the caller's
        self.arrival = arrival  # in seconds on the registry's clock
        self.digest = call.digest
        self.grammar_field = ""
        self.error: ServiceError | None = None
        self.call: TracedCall | None = None  # whose spans are recorded
        self._inputs = [EvaluatedInput() for _ in range(inputs)]
        self._unfinished = inputs
        self._done = asyncio.Event()

    @property
    def cached_tokens(self) -> int:
        """Tokens of the inputs that were found in the prefix cache."""
        return sum(one.usage.cached_tokens for one in self._inputs if one.usage is not None)

    @property
    def finished_here(self) -> tuple[CompletionUsage, ...]:
        """None: nothing is generated."""
        return ()

    @property
    def ended(self) -> bool:
        """All inputs are evaluated, or the call has failed."""
        return self._unfinished == 0 or self.error is not None

    @property
    def taken(self) -> bool:
        """Whether the client may have had something of it."""
        return False

    def push_scores(self, event: PromptScores) -> None:
        """Append scores of an input."""
        self._inputs[event.index].scores.append(event.scores)

    def push_vector(self, event: PromptVector) -> None:
        """Take the vector of an input."""
        self._inputs[event.index].vector = event.data

    def finish(self, event: CompletionEnded) -> None:
        """An input is evaluated."""
        self._inputs[event.index].usage = event.usage
        self._unfinished -= 1
        if not self._unfinished:
            self._done.set()

    def fail(self, error: ServiceError) -> None:
        """The call has failed. No effect after its end."""
        if not self.ended:
            self.error = error
            self._done.set()

    async def results(self) -> Sequence[EvaluatedInput]:
        """Wait for the end: what came back of each input, in their order. Raises the call's error."""
        await self._done.wait()
        if self.error is not None:
            raise self.error
        return self._inputs
