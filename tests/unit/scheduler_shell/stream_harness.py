"""Streams over a real core, with the test in the place of the loop, the executor and the clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.identity import Identity

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.request import DraftingWish
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.step import Capacity, PlannedStep, RowAnswer, StepAnswer
from scheduler_service.link.pool import Served
from scheduler_service.metrics.metrics import Telemetry
from scheduler_service.model import DraftingOffer
from scheduler_service.rpc.codec.output import output_message
from scheduler_service.rpc.codec.requests import check_request
from scheduler_service.streams.continuation import prompt_digest
from scheduler_service.streams.output import OutputStart
from scheduler_service.streams.registry import StreamRegistry
from scheduler_service.streams.request import CheckedRequest
from scheduler_service.streams.stream import RequestStream
from scheduler_service.text.job import TextLimits
from scheduler_service.text.model_text import ModelText
from scheduler_service.text.pool import TextPool
from scheduler_service.text.vocabulary import Vocabulary
from scheduler_service.text.worker.pieces import pieces_of
from tests.support.untyped import present
from tests.unit.scheduler_shell import models_made_here
from tests.unit.scheduler_shell import tokenizers_made_here as made

MODEL = replace(models_made_here.MODEL, vocab_size=made.byte_level().get_vocab_size())
CAPACITY = Capacity(1000, 16, 64, 100, 100, 1000)
LETTERS = [present(made.byte_level().token_to_id(letter)) for letter in "abc"]
CALLER = Identity("ours", "token")


class StreamHarness:
    """A core and its streams; `step` answers for the executor, and `now` is the clock."""

    def __init__(self, config: CoreConfig | None = None) -> None:
        self.now = 0.0
        self.core = StepScheduler(config or CoreConfig())
        self.core.executor_ready(CAPACITY, 0.0)
        self.metrics = Telemetry()
        self.streams = StreamRegistry(self.core, self.metrics, lambda: self.now, lambda: None)
        vocabulary = Vocabulary(pieces_of(made.byte_level()))
        self.text = ModelText(TextPool(TextLimits()), vocabulary, vocab_size=405, has_chat_template=False)

    def admit(
        self,
        id_: str = "r",
        *,
        caller: Identity = CALLER,
        n: int = 1,
        text: bool = False,
        continued: pb.ContinuedCompletion | None = None,
        **stop: object,
    ) -> RequestStream:
        conditions = pb.StopConditions(**stop)  # type: ignore[arg-type]
        tokens = pb.TokenIds(ids=[1, 2])
        message = pb.GenerateRequest(request_id=id_, token_ids=tokens, stop=conditions, n=n)
        if continued is not None:
            message.sampling.seed = 1
            message.continuation.completions.append(continued)
            message.continuation.prompt_digest = prompt_digest([1, 2])
            message.continuation.model_fingerprint = MODEL.fingerprints.model
            message.continuation.sampler = MODEL.fingerprints.sampler
        checked = check_request(message, MODEL, DraftingOffer(default=DraftingWish()))
        served = Served(MODEL, self.text if text else None)
        return self.streams.admit(checked, [1, 2], caller, arrival=self.now, deadline=None, served=served)

    def step(self, tokens: Sequence[int] | None = None, *, deliver: bool = True) -> PlannedStep | None:
        """One step, in which each sampling row gets the next of `tokens` (7 without)."""
        plan = self.core.plan(self.now)
        if plan is None:
            return None
        feed = iter(tokens or ())
        rows = [RowAnswer(row.kv_length + max(1, len(row.tokens)), [next(feed, 7)]) for row in plan.rows] + [
            RowAnswer(len(opening.tokens), [next(feed, 7)]) for opening in plan.openings
        ]
        forks = [RowAnswer(fork.length) for fork in plan.forks]
        self.streams.post(self.core.apply(StepAnswer(plan.number, rows, forks, 900, 0), self.now))
        if deliver:
            self.streams.deliver()
        return plan


def checked(id_: str) -> CheckedRequest:
    """The request that `StreamHarness.admit` makes of this id."""
    tokens, stop = pb.TokenIds(ids=[1, 2]), pb.StopConditions()
    message = pb.GenerateRequest(request_id=id_, token_ids=tokens, stop=stop, n=1)
    return check_request(message, MODEL, DraftingOffer(default=DraftingWish()))


async def read(stream: RequestStream) -> list[pb.GenerateResponse]:
    messages = []
    while batch := await take(stream):
        messages += batch
    return messages


async def take(stream: RequestStream) -> list[pb.GenerateResponse]:
    """What is new, without the message that begins a stream."""
    return [output_message(one) for one in await stream.take() if not isinstance(one, OutputStart)]


def text_of(messages: Sequence[pb.GenerateResponse]) -> str:
    return "".join(message.delta.text for message in messages)
