"""Requests that can't be admitted are refused before their prompts are read or tokenized."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.credentials import Credentials

from scheduler_service.config import SchedulerSettings
from scheduler_service.core.step import Capacity
from scheduler_service.errors import ErrorReason, ServiceError
from scheduler_service.link.pool import Served
from scheduler_service.rpc.arrivals import AT_ONCE
from scheduler_service.rpc.codec.requests import check_request
from scheduler_service.rpc.servicer import SchedulerServicer
from scheduler_service.rpc.statuses import CODES
from scheduler_service.service import SchedulerService
from scheduler_service.text.errors import BusyError, PromptError, StuckError, TextError
from scheduler_service.text.job import TextLimits
from scheduler_service.text.model_text import ModelText
from scheduler_service.text.pool import TextPool
from scheduler_service.text.vocabulary import Vocabulary
from scheduler_service.text.worker.pieces import pieces_of
from tests.unit.scheduler_shell import tokenizers_made_here as made
from tests.unit.scheduler_shell.bad_ends import raises
from tests.unit.scheduler_shell.models_made_here import DRAFTING, MODEL
from tests.unit.scheduler_shell.test_request_codec import chat, ids


class Tokenizer(TextPool):
    """Counts prompts, and refuses them."""

    def __init__(self, error: TextError) -> None:
        super().__init__(TextLimits())
        self.asked = 0
        self._error = error

    async def submit(self, header: dict[str, Any], payload: bytes, caller: str = "") -> bytes:
        self.asked += 1
        raise self._error


class Context:
    """Of an RPC without a deadline."""

    def time_remaining(self) -> None:
        return None

    def auth_context(self) -> dict[str, Any]:
        return {}

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1234"


CONTEXT: Any = Context()


def scheduler(tokenizer: Tokenizer, **settings: Any) -> SchedulerService:
    service = SchedulerService(SchedulerSettings(executor=("127.0.0.1:9",), **settings))
    service.core.executor_ready(Capacity(10, 16, 64, 10, 10, 100), 0.0)
    vocabulary = Vocabulary(pieces_of(made.byte_level()))
    text = ModelText(tokenizer, vocabulary, vocab_size=MODEL.vocab_size, has_chat_template=True)
    service.pool.served = Served(MODEL, text, None)
    return service


async def test_a_full_queue_refuses_before_the_prompt_is_tokenized() -> None:
    tokenizer = Tokenizer(PromptError("asked"))
    service = scheduler(tokenizer, max_queued_requests=1)
    servicer = SchedulerServicer(service, Credentials())
    with raises(ErrorReason.INVALID_REQUEST):
        await servicer.Generate(pb.GenerateRequest(text="hello"), CONTEXT)
    assert tokenizer.asked == 1
    request, caller = check_request(ids(1, 2), MODEL, DRAFTING), Credentials().identify(CONTEXT)
    service.streams.admit(
        request, [1, 2], caller, arrival=0.0, deadline=None, served=Served(MODEL, None, None)
    )
    with raises(ErrorReason.QUEUE_FULL) as caught:
        await servicer.Generate(pb.GenerateRequest(text="hello"), CONTEXT)
    assert tokenizer.asked == 1
    assert caught.value.retry_after_s
    assert service.core.snapshot().counters.refused == 1


def full_with(request: pb.GenerateRequest) -> SchedulerService:
    """A scheduler whose queue this request of CONTEXT's caller fills."""
    service = scheduler(Tokenizer(PromptError("asked")), max_queued_requests=1)
    checked, caller = check_request(request, MODEL, DRAFTING), Credentials().identify(CONTEXT)
    service.streams.admit(
        checked, [1, 2], caller, arrival=0.0, deadline=None, served=Served(MODEL, None, None)
    )
    return service


async def test_a_call_without_room_is_refused_unread() -> None:
    servicer = SchedulerServicer(full_with(ids(1, 2)), Credentials())
    with raises(ErrorReason.QUEUE_FULL) as caught:
        await servicer.admit(CONTEXT)
    assert caught.value.retry_after_s


async def test_a_call_that_may_be_a_resend_is_read() -> None:
    request = ids(1, 2)
    request.request_id = "mine"
    service = full_with(request)
    servicer = SchedulerServicer(service, Credentials())
    await servicer.admit(CONTEXT)
    service.streams.abort("mine", Credentials().identify(CONTEXT).name, "aborted")
    service.streams.admit(
        check_request(ids(1, 2), MODEL, DRAFTING),
        [1, 2],
        Credentials().identify(CONTEXT),
        arrival=0.0,
        deadline=None,
        served=Served(MODEL, None, None),
    )
    with raises(ErrorReason.QUEUE_FULL):
        await servicer.admit(CONTEXT)  # the request with an id has ended


async def test_of_many_calls_at_once_those_without_room_are_refused_unread() -> None:
    request = ids(1, 2)
    request.request_id = "mine"
    servicer = SchedulerServicer(full_with(request), Credentials())
    await servicer.admit(CONTEXT)  # one call may be a resend: it is read
    ends = await asyncio.gather(*(servicer.admit(CONTEXT) for _ in range(20)), return_exceptions=True)
    refused = [end for end in ends if isinstance(end, ServiceError)]
    assert len(refused) >= 20 - AT_ONCE
    assert all(end.reason is ErrorReason.QUEUE_FULL and end.retry_after_s for end in refused)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (PromptError("it takes too long"), "INVALID_ARGUMENT", "messages: it takes too long"),
        (PromptError("is bad", "messages[3].role"), "INVALID_ARGUMENT", "messages[3].role: is bad"),
        (BusyError("busy"), "RESOURCE_EXHAUSTED", "busy"),
        (StuckError("stuck"), "INTERNAL", "stuck"),
    ],
)
async def test_each_failure_of_the_tokenizer_has_its_status(error: TextError, code: str, words: str) -> None:
    servicer = SchedulerServicer(scheduler(Tokenizer(error)), Credentials())
    with pytest.raises(ServiceError) as caught:
        await servicer.Generate(chat(("user", "hello")), CONTEXT)
    assert (CODES[caught.value.reason].name, caught.value.message) == (code, words)
