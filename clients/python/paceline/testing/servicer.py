"""Handlers of a FakeScheduler: paceline.scheduler.v1 on gRPC's threads, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

import grpc
from service_kit.contract import SCHEDULER_REVISION
from service_kit.status import rich_status

from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc
from paceline.testing.calls import ReceivedCall, text_of
from paceline.testing.replies import FakeError, FakeLoss, FakeReply, FakeStall
from paceline.testing.streams import (
    EOS_ID,
    FINGERPRINT,
    MAX_TOKENS,
    MODEL,
    SAMPLER,
    FakeStream,
    StreamRefused,
    collected,
    prompt_bytes,
    stream_of,
)

_Context: TypeAlias = grpc.ServicerContext

Choose = Callable[[ReceivedCall], FakeReply]
"""The reply to a Generate or GenerateUnary call."""

_LOST = "Socket closed"  # what gRPC says of a connection that broke
_ENDLESS_S = 1e8  # gRPC's remaining time of a call without a deadline is more than this
_CAPABILITIES = (
    pb.CAPABILITY_TOKENIZER,
    pb.CAPABILITY_CHAT,
    pb.CAPABILITY_MULTIPLE_COMPLETIONS,
    pb.CAPABILITY_LOGPROBS,
    pb.CAPABILITY_CONTINUATION,
    pb.CAPABILITY_GRAMMAR,
    pb.CAPABILITY_TOOLS,
    pb.CAPABILITY_REASONING,
)
_LIMITS = pb.RequestLimits(
    max_n=16,
    max_stop_strings=16,
    max_stop_string_bytes=256,
    max_stop_token_ids=64,
    max_logit_bias=1024,
    max_logprobs=20,
    max_prompt_bytes=1 << 20,
    max_queued_requests=1024,
    max_queued_tokens=1 << 20,
    max_grammar_bytes=1 << 16,
    max_tools=128,
)


class _ClientLeft(Exception):
    """Nobody waits for the answer any more."""


class _ConnectionLost(Exception):
    """The call is to end as if its connection had broken."""


class FakeServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers calls with the replies that `choose` gives, and appends each call to `calls`.

    It can be added to any `grpc.server`. Methods that it does not have are UNIMPLEMENTED.
    """

    def __init__(self, choose: Choose, calls: list[ReceivedCall]) -> None:
        self._choose, self._calls = choose, calls

    def Generate(self, request: pb.GenerateRequest, context: _Context) -> Iterator[pb.GenerateResponse]:
        """Stream the reply, up to its fault."""
        with self._call("Generate", request, context) as call:
            reply, stream = self._answer(call)
            self._pause(call, reply.first_delay_s)
            self._strike(call, reply, 0)
            context.send_initial_metadata((("request-id", stream.request_id),))
            yield stream.started
            for sent, delta in enumerate(stream.deltas):
                if sent:
                    self._pause(call, reply.delay_s)
                    self._strike(call, reply, sent)
                yield delta
            if stream.deltas:
                self._strike(call, reply, len(stream.deltas))
            yield from stream.finishes

    def GenerateUnary(self, request: pb.GenerateUnaryRequest, context: _Context) -> pb.GenerateUnaryResponse:
        """The reply in one message, after the time that its stream takes."""
        with self._call("GenerateUnary", request.request, context) as call:
            reply, stream = self._answer(call)
            self._pause(call, reply.first_delay_s + reply.delay_s * max(len(stream.deltas) - 1, 0))
            for sent in range(len(stream.deltas) + 1):
                self._strike(call, reply, sent)
            context.send_initial_metadata((("request-id", stream.request_id),))
            return collected(stream)
        return pb.GenerateUnaryResponse()  # to nobody

    def Tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:
        """The bytes of the prompt."""
        with self._call("Tokenize", request, context):
            return pb.TokenizeResponse(token_ids=prompt_bytes(request))

    def Detokenize(self, request: pb.DetokenizeRequest, context: _Context) -> pb.DetokenizeResponse:
        """The text of bytes."""
        with self._call("Detokenize", request, context):
            return pb.DetokenizeResponse(text=text_of(request.token_ids))

    def Abort(self, request: pb.AbortRequest, context: _Context) -> pb.AbortResponse:
        """End running calls with ABORTED."""
        with self._call("Abort", request, context):
            response = pb.AbortResponse()
            for request_id in request.request_ids:
                aborted = [one.abort() for one in list(self._calls) if one.request_id == request_id]
                (response.aborted if any(aborted) else response.unknown).append(request_id)
            return response

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: _Context) -> pb.GetModelInfoResponse:
        """A model of bytes that can do everything that a FakeReply has."""
        with self._call("GetModelInfo", request, context):
            return pb.GetModelInfoResponse(
                name=MODEL,
                architecture=MODEL,
                vocab_size=EOS_ID + 1,
                context_length=MAX_TOKENS,
                max_request_tokens=MAX_TOKENS,
                eos_token_ids=[EOS_ID],
                has_chat_template=True,
                limits=_LIMITS,
                model_fingerprint=FINGERPRINT,
                contract_revision=SCHEDULER_REVISION,
                capabilities=_CAPABILITIES,
                sampler=SAMPLER,
                tool_format="hermes",
            )

    def GetStatus(self, request: pb.GetStatusRequest, context: _Context) -> pb.GetStatusResponse:
        """SERVING, and the counts of Generate and GenerateUnary calls."""
        with self._call("GetStatus", request, context):
            outcomes = [one.outcome for one in list(self._calls) if one.method.startswith("Generate")]
            return pb.GetStatusResponse(
                state=pb.SCHEDULER_STATE_SERVING,
                ready_executors=1,
                running=outcomes.count("running"),
                requests=len(outcomes),
                finished=outcomes.count("answered"),
                cancelled=outcomes.count("left"),
                failed=outcomes.count("failed"),
            )

    def _absent(self, request: object, context: _Context) -> NoReturn:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "the fake scheduler does not have this method")

    # The generated base's methods raise, which gRPC logs with a traceback.
    Score = Embed = Rerank = GetTokenizer = GetVocabulary = _absent
    WhyWaiting = WatchSteps = WatchSchedulers = AnnounceScheduler = _absent

    @contextmanager
    def _call(self, method: str, request: Any, context: _Context) -> Iterator[ReceivedCall]:
        """Record a call and how it ends; errors become statuses. It may end early: the client left."""
        left_s = context.time_remaining()
        deadline_s = None if left_s is None or left_s > _ENDLESS_S else left_s
        call = ReceivedCall(method, request, dict(context.invocation_metadata()), deadline_s)
        self._calls.append(call)
        if not context.add_callback(lambda: call.end("left")):
            call.end("left")
        try:
            yield call
            call.end("answered")
        except _ClientLeft:
            call.end("left")
        except StreamRefused as refused:
            call.end("failed")
            self._fail(context, refused.error)
        except _ConnectionLost:
            call.end("failed")
            context.abort(grpc.StatusCode.UNAVAILABLE, _LOST)

    def _answer(self, call: ReceivedCall) -> tuple[FakeReply, FakeStream]:
        """The reply to a call, and its stream. Raises StreamRefused."""
        if call.request.WhichOneof("prompt") is None:
            raise StreamRefused(FakeError("INVALID_REQUEST", "prompt: is required", field="prompt"))
        reply = self._choose(call)
        return reply, stream_of(reply, call.request, call.request_id)

    def _pause(self, call: ReceivedCall, seconds: float | None) -> None:
        """Wait; without limit for None. Raises what ends the call meanwhile."""
        if call.pause(seconds):
            return
        if call.aborted:
            raise StreamRefused(FakeError("ABORTED", "aborted"))
        raise _ClientLeft

    def _strike(self, call: ReceivedCall, reply: FakeReply, sent: int) -> None:
        """Let the reply's fault happen, if it comes after `sent` deltas."""
        fault = reply.fault
        if fault is None or fault.after != sent:
            return
        match fault:
            case FakeError():
                raise StreamRefused(fault)
            case FakeLoss():
                raise _ConnectionLost
            case FakeStall():
                self._pause(call, None)

    def _fail(self, context: _Context, error: FakeError) -> NoReturn:
        context.abort_with_status(
            rich_status(
                error.code,
                error.message or f"{error.reason}: as the FakeScheduler was asked to fail",
                reason=error.reason,
                metadata={"field": error.field} if error.field else {},
                field=error.field,
                retry_after_s=error.retry_s,
            )
        )
        raise AssertionError("abort_with_status returned")
