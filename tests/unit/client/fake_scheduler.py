# ruff: noqa: N802  RPC names are the proto's
"""A scheduler of a few lines, scripted by the prompt: what the client does with answers is the subject."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from paceline.scheduler.v1 import admin_pb2, admin_pb2_grpc, scheduler_pb2_grpc
from paceline.scheduler.v1 import scheduler_pb2 as pb

from tests.unit.client.fake_evaluations import FakeAdapters, FakeEvaluations


def rich_status(code: int, message: str, reason: str, retry_after_s: float | None = None) -> grpc.Status:
    details = [
        error_details_pb2.ErrorInfo(reason=reason, domain="paceline", metadata={"field": "max_tokens"})
    ]
    if retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = [any_pb2.Any() for _ in details]
    for box, detail in zip(packed, details, strict=True):
        box.Pack(detail)
    status: grpc.Status = rpc_status.to_status(status_pb2.Status(code=code, message=message, details=packed))
    return status


class FakeScheduler(FakeEvaluations, scheduler_pb2_grpc.SchedulerServiceServicer):
    """By prompt: "forever" never ends, "midway" fails after a delta, "full" is refused; else three words.

    A chat that asks "why" has reasoning before them. One with tools has calls of them after, unless it ends
    with a tool's answer; their arguments are the question, if it is JSON.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: dict[str, str] = {}
        self.loading = False
        self.vocabularies: list[bytes] = []
        self.cancelled = asyncio.Event()
        self.arrived = asyncio.Event()
        self.looks = 0
        self.dies = False
        self.waits = pb.WhyWaitingResponse()  # of all identities

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        try:
            self.requests.append(request)
            self.arrived.set()
            self.metadata = dict(context.invocation_metadata())
            await context.send_initial_metadata((("request-id", request.request_id or "drawn"),))
            match request.text:
                case "full":
                    await context.abort_with_status(
                        rich_status(code_pb2.RESOURCE_EXHAUSTED, "the queue is full", "QUEUE_FULL", 1.5)
                    )
                case "midway":
                    yield pb.GenerateResponse(delta=pb.Delta(token_ids=[1], text="once"))
                    await context.abort_with_status(
                        rich_status(code_pb2.INTERNAL, "the device failed", "DEVICE")
                    )
                case "forever":
                    while True:
                        yield pb.GenerateResponse(delta=pb.Delta(token_ids=[7], text="x"))
                        await asyncio.sleep(0.001)
                case _:
                    turns = list(request.messages.messages)
                    asked = [turn.content for turn in turns]
                    if request.text == "warned":
                        yield pb.GenerateResponse(started=pb.Started(warnings=["[one] \x1b]0;two\x07"]))
                    tools = [] if turns and turns[-1].role == "tool" else request.messages.tools
                    for index in range(max(request.n, 1)):
                        if asked[-1:] == ["why"]:
                            yield pb.GenerateResponse(index=index, delta=pb.Delta(reasoning="Hmm. "))
                        for token, text in enumerate(["a ", "b ", "c"]):
                            yield pb.GenerateResponse(
                                index=index,
                                delta=pb.Delta(
                                    token_ids=[token],
                                    text=text,
                                    logprobs=[
                                        pb.TokenLogprobs(logprob=-0.5, top_ids=[4], top_logprobs=[-0.5])
                                    ],
                                ),
                            )
                        for number, tool in enumerate(tools):
                            arguments = asked[-1] if asked[-1].startswith("{") else "{}"
                            call = pb.ToolCallDelta(
                                index=number, id=f"{number}", name=tool.name, arguments=arguments
                            )
                            yield pb.GenerateResponse(index=index, delta=pb.Delta(tool_calls=[call]))
                        end = pb.Finished()
                        end.CopyFrom(FINISHED)
                        if request.text == "cut":
                            end.reason = pb.FINISH_REASON_LENGTH
                        yield pb.GenerateResponse(index=index, finished=end)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        except GeneratorExit:
            self.cancelled.set()
            raise

    async def GenerateUnary(self, request: pb.GenerateUnaryRequest, context: Any) -> pb.GenerateUnaryResponse:
        self.requests.append(request.request)
        completion = pb.Completion(index=0, token_ids=[0, 1, 2], text="a b c", finished=FINISHED)
        return pb.GenerateUnaryResponse(request_id="drawn", completions=[completion])

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=request.text.encode())

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text=bytes(request.token_ids).decode())

    async def GetVocabulary(self, request: pb.GetVocabularyRequest, context: Any) -> pb.GetVocabularyResponse:
        """In parts of 100; `vocabularies` are the fingerprints of the coming replies."""
        self.metadata = dict(context.invocation_metadata())
        fingerprint = self.vocabularies.pop(0) if self.vocabularies else b"v"
        first, behind = request.first_id, min(256, request.first_id + 100)
        return pb.GetVocabularyResponse(
            fingerprint=fingerprint,
            next_id=behind % 256,
            tokens=[fingerprint + bytes([token]) for token in range(first, behind)],
        )

    async def WatchSchedulers(self, request: pb.WatchSchedulersRequest, context: Any) -> Any:
        self.looks += 1
        yield await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no directory")

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        return pb.AbortResponse(aborted=request.request_ids[:1], unknown=request.request_ids[1:])

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        if self.loading:
            await context.abort_with_status(rich_status(code_pb2.UNAVAILABLE, "loading", "NOT_READY", 1.0))
        return pb.GetModelInfoResponse(
            name="fake",
            vocab_size=256,
            eos_token_ids=[0],
            has_chat_template=True,
            max_request_tokens=1000,
            capabilities=[pb.CAPABILITY_CHAT, pb.CAPABILITY_REASONING],
            tool_format="hermes",
            limits=pb.RequestLimits(max_n=4, max_inputs=3),
            adapters=[pb.Adapter(name="a", fingerprint=b"f", rank=4)],
            embedding_size=4,
            drafters=[pb.DRAFTER_NGRAM, cast(Any, 77)],  # 77: of a newer server
            speculation=pb.Speculation(mode=pb.SPECULATION_MODE_FIXED, draft_tokens=4),
        )

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        serving = pb.SCHEDULER_STATE_SERVING
        return pb.GetStatusResponse(state=serving, running=2, waiting=3, seats=4, ready_executors=1)

    async def WhyWaiting(self, request: pb.WhyWaitingRequest, context: Any) -> pb.WhyWaitingResponse:
        """Knows the request "known", which is the only slow one, and two with a common part."""
        one = pb.RequestWait(
            request_id="known",
            phase=pb.REQUEST_PHASE_QUEUED,
            reason=pb.WAIT_REASON_PAGES,
            queue_waits=[pb.WaitTime(reason=pb.WAIT_REASON_PAGES, us=7)],
            explanation="It waits because [pages] are few.",
            labels={"job": "7"},
        )
        if request.all_identities:
            return self.waits
        known = {
            "…" + "0" * 8: ("aa00000000", "bb00000000"),
            "…0" + "1" * 8: ("aa011111111",),
        }.get(request.request_id, ("known",) if request.slow or request.request_id == "known" else ())
        response = pb.WhyWaitingResponse()
        for name in known:
            one.request_id = name
            response.requests.append(one)
        return response

    async def WatchSteps(
        self, request: pb.WatchStepsRequest, context: Any
    ) -> AsyncIterator[pb.WatchStepsResponse]:
        """Two steps: request 1 is queued, admitted and ends, request 2 is queued. Then the stream ends.

        As if the scheduler had died, if `dies`.
        """
        self.metadata = dict(context.invocation_metadata())
        ones = [1, 1]
        kinds = [pb.STEP_EVENT_KIND_QUEUED, pb.STEP_EVENT_KIND_ADMITTED, pb.STEP_EVENT_KIND_QUEUED]
        log = pb.StepLog(
            first_step=7,
            lost_steps=3,
            started_at_us=1_000_000,
            started_us=[0, 5000],
            planned_us=[4000, 4000],
            taken_us=[4000, 3000],
            tokens=[9, 2],
            free_pages=[8, 6],
            prompt_rows=[1, 0],
            decode_rows=[0, 2],
            verify_rows=[0, 0],
            drafted_tokens=[0, 0],
            accepted_tokens=[0, 0],
            running=ones,
            waiting=ones,
            event_counts=[2, 2],
            reasons=[pb.WAIT_REASON_PAGES, pb.WAIT_REASON_UNSPECIFIED],
            event_kinds=[*kinds, pb.STEP_EVENT_KIND_ENDED],
            event_requests=[1, 1, 2, 1],
            event_indexes=[0, 0, 0, 0],
            event_values=[3, 0, 3, 4],
            names=[pb.RequestName(number=1, request_id="mine")],
        )
        yield pb.WatchStepsResponse(log=log)
        if self.dies:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")


class FakeAdmin(FakeAdapters, admin_pb2_grpc.AdminServiceServicer):
    """One executor."""

    async def ListExecutors(
        self, request: admin_pb2.ListExecutorsRequest, context: Any
    ) -> admin_pb2.ListExecutorsResponse:
        return admin_pb2.ListExecutorsResponse(
            executors=[admin_pb2.Executor(address="here", connected=True, active=True)]
        )


FINISHED = pb.Finished(
    reason=pb.FINISH_REASON_STOP,
    stop_string="END",
    usage=pb.Usage(
        prompt_tokens=5,
        completion_tokens=3,
        first_token_ms=7,
        total_ms=9,
        drafted_tokens=5,
        accepted_tokens=3,
        verifications=2,
        drafted_by_position=[2, 2, 1],
        accepted_by_position=[2, 1, 0],
    ),
)
