"""Handlers of paceline.scheduler.v1: check, tokenize, admit, stream. Failures are raised as ServiceError."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import grpc.aio
from paceline.channel import PUBLIC_MESSAGE_BYTES
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceServicer
from service_kit.credentials import Credentials
from service_kit.identity import Identity

from scheduler_service.core.waiting.reasons import WaitReason
from scheduler_service.errors import ErrorReason, ServiceError, invalid, unsupported
from scheduler_service.link.executor import MAX_WARNINGS
from scheduler_service.link.pool import Served
from scheduler_service.rpc.arrivals import ArrivalQueue, RefusalPace
from scheduler_service.rpc.arriving import ArrivingCall, ArrivingCalls, call_came, deadline_of
from scheduler_service.rpc.codec.adapters import check_still_served, find_adapter
from scheduler_service.rpc.codec.checks import check_range, check_size
from scheduler_service.rpc.codec.embed import EmbedTask
from scheduler_service.rpc.codec.output import UnaryAnswer, output_message
from scheduler_service.rpc.codec.requests import (
    check_aborts,
    check_detokenize,
    check_priority,
    check_prompt,
    check_request,
    check_returned_prompt,
)
from scheduler_service.rpc.codec.rerank import RerankTask
from scheduler_service.rpc.codec.responses import (
    model_info,
    service_status,
    shown_tokens,
    tokenize_response,
    tokenizer_pieces,
    vocabulary_part,
)
from scheduler_service.rpc.codec.score import ScoreTask
from scheduler_service.rpc.delivery import delivering
from scheduler_service.rpc.directory_calls import DirectoryCalls
from scheduler_service.rpc.evaluations import Evaluations
from scheduler_service.rpc.statuses import text_errors
from scheduler_service.rpc.step_calls import StepCalls
from scheduler_service.rpc.tool_jobs import with_tools
from scheduler_service.rpc.waiting_calls import WaitingCalls
from scheduler_service.service import SchedulerService
from scheduler_service.streams.request import ChatPrompt, CheckedRequest, Prompt, TextPrompt, TokenPrompt
from scheduler_service.streams.stream import RequestStream

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class SchedulerServicer(SchedulerServiceServicer):
    """The public API. Handlers keep no state of requests; `service.streams` does."""

    def __init__(self, service: SchedulerService, credentials: Credentials) -> None:
        self._service, self._credentials = service, credentials
        self._metrics = service.metrics
        self._drafting = service.settings.drafting
        self._arrivals, self._refusals = ArrivalQueue(), RefusalPace(time.monotonic)
        self._directory_calls = DirectoryCalls(service.directory, credentials)
        self._step_calls = StepCalls(service.core.log, credentials)
        self._arriving = ArrivingCalls()
        self._waiting = WaitingCalls(service.core, self._arriving)
        self._evaluations = Evaluations(service, credentials, self.refused, self._arriving)
        self._metrics.arriving = self._arriving_by_reason

    async def Generate(  # type: ignore[override]  # writes, and so is no iterator
        self, request: pb.GenerateRequest, context: _Context
    ) -> None:
        """Stream a request's output. The request ends when this coroutine does, for whatever reason."""
        stream = await self._admitted(request, context)
        with delivering(self._service, stream):
            write = context.write
            outputs = await stream.take()
            # Not before the first message: until then the client's own retries work.
            await context.send_initial_metadata((("request-id", stream.request_id),))
            while outputs:
                for output in outputs:
                    await write(output_message(output))
                outputs = await stream.take()

    async def GenerateUnary(
        self, request: pb.GenerateUnaryRequest, context: _Context
    ) -> pb.GenerateUnaryResponse:
        """The output of Generate, collected into one response."""
        if request.request.HasField("prompt_logprobs"):
            raise unsupported("prompt_logprobs", "GenerateUnary's response has no place for them")
        stream = await self._admitted(request.request, context)
        stream.method = "GenerateUnary"
        try:
            answer = UnaryAnswer(stream.request_id)
            while outputs := await stream.take():
                answer.add(outputs)
            await context.send_initial_metadata((("request-id", stream.request_id),))
            return answer.response()
        except ServiceError as error:
            self._metrics.ended_badly(error)
            raise
        finally:
            self._service.streams.close(stream)

    async def Score(  # type: ignore[override]  # encodes by itself, as the next two
        self, request: pb.ScoreRequest, context: _Context
    ) -> bytes:
        """Logprobs of given tokens."""
        return await self._evaluations.answer(partial(ScoreTask, request), context)

    async def Embed(  # type: ignore[override]
        self, request: pb.EmbedRequest, context: _Context
    ) -> bytes:
        """Vectors of texts."""
        return await self._evaluations.answer(partial(EmbedTask, request), context)

    async def Rerank(  # type: ignore[override]
        self, request: pb.RerankRequest, context: _Context
    ) -> bytes:
        """Documents in the order in which they answer a query."""
        return await self._evaluations.answer(partial(RerankTask, request), context)

    async def Tokenize(  # type: ignore[override]  # encodes by itself
        self, request: pb.TokenizeRequest, context: _Context
    ) -> bytes:
        """Token ids of a prompt, the same that Generate uses.

        Encoding a million ids takes 50 ms, so other tasks get turns in between.
        """
        served = self._served(context)
        self._check_model(request.model, served)
        caller = self._credentials.identify(context)
        prompt = check_prompt(request, served.model)
        begins = True
        if request.HasField("add_special_tokens"):
            if isinstance(prompt, ChatPrompt):
                raise invalid("add_special_tokens", "not with messages: the chat template writes them")
            begins = request.add_special_tokens
        ids = await _token_ids(prompt, served, caller, begins=begins)
        parts = [part async for part in _in_turns(tokenize_response(ids))]
        if request.return_tokens and served.text is not None:
            size = sum(map(len, parts))
            async for part in _in_turns(shown_tokens(ids, served.text.vocabulary)):
                parts.append(part)
                size += len(part)
                check_size("return_tokens", size, PUBLIC_MESSAGE_BYTES, "bytes of the reply")
        return b"".join(parts)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: _Context) -> pb.DetokenizeResponse:
        """The text of token ids, the same that Generate returns for them."""
        served = self._served(context)
        self._check_model(request.model, served)
        check_detokenize(request.token_ids, served.model)
        if served.text is None:
            raise ServiceError(ErrorReason.TOKENIZER_NOT_FOUND, "the model has no tokenizer")
        return pb.DetokenizeResponse(text=await served.text.decode(request.token_ids))

    async def Abort(self, request: pb.AbortRequest, context: _Context) -> pb.AbortResponse:
        """End the caller's requests by id."""
        check_aborts(request.request_ids)
        caller = self._credentials.identify(context)
        response = pb.AbortResponse()
        for request_id in request.request_ids:
            aborted = self._service.streams.abort(request_id, caller.name, "aborted")
            (response.aborted if aborted else response.unknown).append(request_id)
        return response

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: _Context
    ) -> pb.GetModelInfoResponse:
        """The served model and the limits of a request: once an executor was ready, even while none is."""
        served, service = self._served(context), self._service
        self._check_model(request.model, served)
        return model_info(
            served.model,
            max_request_tokens=service.core.max_request_tokens,
            has_text=served.text is not None,
            has_chat_template=served.text is not None and served.text.has_chat_template,
            queue=service.settings.core,
            drafting=service.settings.drafting,
            adapters=service.wanted.served,
            caller=self._credentials.identify(context),
            has_directory=service.directory is not None,
        )

    async def GetTokenizer(  # type: ignore[override]  # writes, and so is no iterator
        self, request: pb.GetTokenizerRequest, context: _Context
    ) -> None:
        """The tokenizer's files as the executor sent them, in pieces."""
        served = self._served(context)
        self._check_model(request.model, served)
        if served.files is None:
            raise ServiceError(ErrorReason.TOKENIZER_NOT_FOUND, "the model has no tokenizer")
        for piece in tokenizer_pieces(served.files, served.model.eos_token_ids):
            await context.write(piece)

    async def GetVocabulary(  # type: ignore[override]  # encodes by itself
        self, request: pb.GetVocabularyRequest, context: _Context
    ) -> bytes:
        """The bytes of tokens from an id on, about a mebibyte of them."""
        served = self._served(context)
        self._check_model(request.model, served)
        if served.text is None:
            raise ServiceError(ErrorReason.TOKENIZER_NOT_FOUND, "the model has no tokenizer")
        fingerprint, size = served.model.vocabulary.fingerprint, served.model.vocab_size
        check_range("first_id", request.first_id, 0, size - 1)
        if request.known_fingerprint == fingerprint:
            return pb.GetVocabularyResponse(fingerprint=fingerprint).SerializeToString()
        parts = vocabulary_part(served.text.vocabulary, fingerprint, size, request.first_id)
        return b"".join([part async for part in _in_turns(parts)])

    async def WhyWaiting(self, request: pb.WhyWaitingRequest, context: _Context) -> pb.WhyWaitingResponse:
        """What the caller's requests wait for; administrators may ask for any identity's."""
        return self._waiting.answer(request, self._credentials.identify(context))

    async def WatchSteps(  # type: ignore[override]
        self, request: pb.WatchStepsRequest, context: _Context
    ) -> None:
        """The log of the scheduler's steps, and those that follow."""
        await self._step_calls.watch(request, context)

    async def WatchSchedulers(  # type: ignore[override]
        self, request: pb.WatchSchedulersRequest, context: _Context
    ) -> None:
        """The schedulers of the fleet, and what changes."""
        await self._directory_calls.watch(request, context)

    async def AnnounceScheduler(
        self, request: pb.AnnounceSchedulerRequest, context: _Context
    ) -> pb.AnnounceSchedulerResponse:
        """Write the caller's entry of the directory."""
        return self._directory_calls.announce(request, context)

    async def GetStatus(self, request: pb.GetStatusRequest, context: _Context) -> pb.GetStatusResponse:
        """State, counters and load; answered in every state of the service."""
        service = self._service
        return service_status(
            state=service.state,
            uptime_s=time.monotonic() - service.started_at,
            ready_executors=service.ready_executors,
            snapshot=service.core.snapshot(),
            rates=service.rates,
            fault=service.core.fault,
            arriving=self._arriving_by_reason().total(),
        )

    def _arriving_by_reason(self) -> Counter[WaitReason]:
        """How many requests that are not queued yet wait for what."""
        counts = self._arriving.by_reason()
        counts[WaitReason.CALLERS_TURN] += len(self._arrivals)
        return counts

    async def admit(self, context: _Context) -> None:
        """Wait until a call that would be queued may start: callers take turns.

        Raises ServiceError, before the message is read, if no further request of the caller would be queued.
        Only a call that may be a resend is read first, unless the caller has sent many at once.
        """
        call_came()
        await self.take_turn(self._credentials.identify(context), context)

    async def take_turn(self, caller: Identity, context: _Context) -> None:
        """As `admit`, for a caller that another port has identified."""
        had_to_wait = await self._arrivals.turn(caller.name)
        if not had_to_wait and self._service.streams.may_be_resent(caller):
            return
        try:
            self._service.served_for_request(caller)
            self._service.streams.check_room(caller, 1, deadline_of(context))
        except ServiceError as error:
            await self.refused(caller, error)
            raise

    async def refused(self, caller: Identity, error: ServiceError) -> None:
        """Count a refusal, and delay it if the caller gets too many."""
        self._metrics.ended_badly(error)
        if error.reason in _REFUSALS:
            contested = self._service.core.is_contested
            if delay_s := self._refusals.delay_s(caller.name, contested=contested):
                await asyncio.sleep(delay_s)

    async def _admitted(self, request: pb.GenerateRequest, context: _Context) -> RequestStream:
        return await self.open_stream(request, self._credentials.identify(context), context)

    async def open_stream(
        self, request: pb.GenerateRequest, caller: Identity, context: _Context
    ) -> RequestStream:
        """Check, tokenize and queue a request of `caller`; returns its stream, to be read with `delivering`.

        `context` has the deadline. Raises ServiceError, and then nothing has changed.
        """
        call, deadline = ArrivingCall(), deadline_of(context)
        try:
            served = self._service.served_for_request(caller)
            checked = check_request(request, served.model, self._drafting, self._service.wanted)
            with self._arriving.entered(call, caller.name, checked.id, checked.labels):
                stream = await self._queued(checked, call, caller, deadline, served)
            self._service.wanted.count(checked.adapter)
            return stream
        except ServiceError as error:
            await self.refused(caller, error)
            raise

    async def _queued(
        self,
        checked: CheckedRequest,
        call: ArrivingCall,
        caller: Identity,
        deadline: float | None,
        served: Served,
    ) -> RequestStream:
        check_priority(checked.priority, caller)
        min_tokens = len(checked.prompt.ids) if isinstance(checked.prompt, TokenPrompt) else 1
        self._service.streams.check(caller, checked, min_tokens, deadline)  # before tokenizing
        checked = await with_tools(checked, served, caller)
        warnings = self._service.drafting_warnings(checked.speculation, caller)
        if (grammar := checked.sampling.grammar) is not None:
            with call.compiling():
                warnings += await self._service.grammars.check(
                    grammar, caller, deadline, checked.grammar_field
                )
        if warnings:
            checked = replace(checked, warnings=warnings[:MAX_WARNINGS])
        ids = await _token_ids(checked.prompt, served, caller)
        check_returned_prompt(checked, len(ids))
        check_still_served(checked.adapter, served.model, self._service.wanted)
        return self._service.streams.admit(
            checked,
            ids,
            caller,
            arrival=call.arrival,
            deadline=deadline,
            served=served,
            phases=call.phases,
        )

    def _check_model(self, name: str, served: Served) -> None:
        """Raises ServiceError unless it is empty, or names the model or an adapter."""
        find_adapter(name, served.model, self._service.wanted)

    def _served(self, context: _Context) -> Served:
        """The served model. Raises ServiceError before an executor was ready; administrators see why."""
        return self._service.served(self._credentials.identify(context))


_REFUSALS = (ErrorReason.QUEUE_FULL, ErrorReason.QUOTA, ErrorReason.TOO_LATE)


async def _in_turns(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Parts of a reply, with turns of other tasks between them."""
    for part in parts:
        yield part
        await asyncio.sleep(0)


async def _token_ids(
    prompt: Prompt, served: Served, caller: Identity, *, begins: bool = True
) -> Sequence[int]:
    """The prompt's token ids, at least one. Text gets a BOS only if it `begins`. Raises ServiceError."""
    if isinstance(prompt, TokenPrompt):
        return prompt.ids
    field = "text" if isinstance(prompt, TextPrompt) else "messages"
    model_text = served.text
    if model_text is None:
        raise invalid(field, "the model has no tokenizer: send token_ids")
    with text_errors(field):
        if isinstance(prompt, TextPrompt):
            ids = await model_text.encode_text(prompt.text, caller.name, begins=begins)
        else:
            ids = await model_text.encode_messages(
                prompt.messages,
                served.model.limits.max_prompt_bytes,
                arguments=prompt.arguments,
                tools=prompt.tools,
                continues=prompt.continues,
                opens=prompt.opens,
                caller=caller.name,
            )
    if not ids:
        raise invalid(field, "has no tokens")
    return ids
