"""The RPCs: decode, await the device thread, encode. The event loop never waits for the device.

The interceptor of `errors.py` turns RequestRefused into the status of the RPC.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import grpc.aio
from paceline.executor.v1 import executor_pb2 as pb
from paceline.executor.v1 import executor_pb2_grpc as rpc
from service_kit.audit import Audit
from service_kit.credentials import Credentials
from service_kit.logs import Log

from executor_service.contract.plan import Reason, Refusal, RequestRefused, StepPlan, StepResult
from executor_service.rpc.codec.adapters import decode_load, encode_adapter, encode_adapters
from executor_service.rpc.codec.forward import decode_forward, encode_tensor
from executor_service.rpc.codec.grammars import NO_GRAMMARS, CompiledGrammars, decode_grammar, sources_of
from executor_service.rpc.codec.refusals import unsupported
from executor_service.rpc.codec.results import encode_caches, encode_error, encode_result
from executor_service.rpc.codec.rows import (
    BATCH_DECODE,
    BATCH_PREFILL,
    DECODE,
    PREFILL,
    UNIFIED,
    VERIFY,
    Takes,
)
from executor_service.rpc.codec.steps import decode_op, decode_step
from executor_service.rpc.info import encode_info, encode_status, encode_tokenizer
from executor_service.rpc.metrics import Metrics
from executor_service.runtime.adapter_loader import AdapterLoader
from executor_service.runtime.runtime import Runtime
from executor_service.runtime.warmup import warm_up

if TYPE_CHECKING:  # it imports OpenTelemetry
    from executor_service.rpc.spans import StepSpans

log = Log(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class _HasResult(Protocol):
    @property
    def result(self) -> pb.StepResult: ...


R = TypeVar("R", bound=_HasResult)
Answer = tuple[StepPlan, StepResult]

_DEADLINE_MARGIN_S = 0.05  # of Drain, which replies before the deadline of its RPC


class ExecutorServicer(rpc.ExecutorServiceServicer):
    """paceline.executor.v1.ExecutorService."""

    def __init__(
        self,
        runtime: Runtime,
        metrics: Metrics,
        credentials: Credentials,
        audit: Audit,
        spans: StepSpans | None = None,
    ) -> None:
        self._runtime, self._metrics, self._credentials = runtime, metrics, credentials
        self._audit, self._spans = audit, spans

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Context) -> pb.OpenSessionResponse:
        """Open a session, after ending those that it replaces."""
        loaded = self._runtime.loaded
        max_bytes, caller = loaded.limits.max_label_bytes, self._caller(context)
        for name, text in (("label", request.label), ("owner", request.owner)):
            if len(text.encode()) > max_bytes:
                raise RequestRefused(Reason.TOO_LARGE, f"{name}: at most {max_bytes} bytes (max_label_bytes)")
        session = await self._runtime.worker.submit(
            lambda: loaded.engine.open_session(
                request.replaces, request.lease_ms, request.label, request.owner, caller
            )
        )
        log.info("session opened", label=request.label, caller=caller, replaces_one=bool(request.replaces))
        return pb.OpenSessionResponse(
            session_id=session.id,
            epoch=self._runtime.epoch,
            lease_ms=round(session.lease_s * 1000),
            max_in_flight=loaded.limits.max_in_flight,
        )

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Context
    ) -> pb.CloseSessionResponse:
        """End a session after its queued steps, even if the client does not wait for the reply."""
        engine, caller = self._runtime.loaded.engine, self._caller(context)
        released = await self._runtime.worker.submit(
            lambda: engine.close_session(request.session_id, caller), kept=True
        )
        return pb.CloseSessionResponse(released=released)

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        """Describe the model, the limits and the capabilities."""
        return encode_info(self._runtime, self._runtime.loaded)

    async def GetTokenizer(  # type: ignore[override]  # writes; a generator may never be closed
        self, request: pb.GetTokenizerRequest, context: Context
    ) -> None:
        """Send the tokenizer's files, in pieces."""
        loaded = self._runtime.loaded
        if loaded.tokenizer is None:
            raise RequestRefused(Reason.TOKENIZER, "the model has no tokenizer")
        for piece in encode_tokenizer(loaded.tokenizer, loaded.info):
            await context.write(piece)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """Report state and counters without waiting for the device; renews the session's lease."""
        loaded = self._runtime.loaded_or_none
        if request.epoch not in (0, self._runtime.epoch):
            raise RequestRefused(Reason.EPOCH, f"epoch: {request.epoch} is over, it is {self._runtime.epoch}")
        if loaded is not None and request.session_id:
            loaded.engine.store.sessions.get(request.session_id, self._caller(context))
        return encode_status(self._runtime, loaded)

    async def GetCaches(self, request: pb.GetCachesRequest, context: Context) -> pb.GetCachesResponse:
        """Report lengths and pending tokens of caches, after the queued steps."""
        loaded = self._runtime.loaded
        ids, max_ids = tuple(request.cache_ids), loaded.limits.max_released_ids
        if len(ids) > max_ids:
            raise RequestRefused(
                Reason.TOO_LARGE, f"cache_ids: at most {max_ids} (max_released_ids), has {len(ids)}"
            )
        look = partial(loaded.engine.look, request.session_id, request.epoch, ids, self._caller(context))
        last_step_id, views = await self._runtime.worker.submit(look)
        return encode_caches(views, last_step_id, self._runtime.epoch)

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        """Compute one opening or chunk."""
        return self._encode_single(pb.PrefillResponse(), await self._computed(request.step, PREFILL, context))

    async def BatchPrefill(
        self, request: pb.BatchPrefillRequest, context: Context
    ) -> pb.BatchPrefillResponse:
        """Compute openings and chunks."""
        return self._encode(
            pb.BatchPrefillResponse(),
            await self._computed(request.step, BATCH_PREFILL, context),
        )

    async def Decode(self, request: pb.DecodeRequest, context: Context) -> pb.DecodeResponse:
        """Compute one row without drafts."""
        return self._encode_single(pb.DecodeResponse(), await self._computed(request.step, DECODE, context))

    async def BatchDecode(self, request: pb.BatchDecodeRequest, context: Context) -> pb.BatchDecodeResponse:
        """Compute rows without drafts."""
        return self._encode(
            pb.BatchDecodeResponse(),
            await self._computed(request.step, BATCH_DECODE, context),
        )

    async def UnifiedDecode(
        self, request: pb.UnifiedDecodeRequest, context: Context
    ) -> pb.UnifiedDecodeResponse:
        """Compute any rows."""
        return self._encode(pb.UnifiedDecodeResponse(), await self._computed(request.step, UNIFIED, context))

    async def ForwardVerify(
        self, request: pb.ForwardVerifyRequest, context: Context
    ) -> pb.ForwardVerifyResponse:
        """Verify drafts: compute rows that all have drafts, on their caches."""
        return self._encode(pb.ForwardVerifyResponse(), await self._computed(request.step, VERIFY, context))

    async def TruncateKv(self, request: pb.TruncateKvRequest, context: Context) -> pb.TruncateKvResponse:
        """Shorten one cache."""
        return self._encode_single(pb.TruncateKvResponse(), await self._op(request, context))

    async def ReleaseCache(
        self, request: pb.ReleaseCacheRequest, context: Context
    ) -> pb.ReleaseCacheResponse:
        """Release caches."""
        return self._encode_single(pb.ReleaseCacheResponse(), await self._op(request, context))

    async def ForkCache(self, request: pb.ForkCacheRequest, context: Context) -> pb.ForkCacheResponse:
        """Copy one cache."""
        return self._encode_single(pb.ForkCacheResponse(), await self._op(request, context))

    async def StreamUnifiedDecode(  # type: ignore[override]  # writes; a generator may never be closed
        self, request_iterator: AsyncIterator[pb.StreamUnifiedDecodeRequest], context: Context
    ) -> None:
        """Compute steps in order. At most `max_in_flight` of them are read ahead of their replies."""
        caller = self._caller(context)
        slots = asyncio.Semaphore(self._runtime.config.max_in_flight)
        answers: asyncio.Queue[tuple[int, asyncio.Future[Answer] | RequestRefused] | None] = asyncio.Queue()

        async def read() -> None:
            try:
                await slots.acquire()
                async for request in request_iterator:
                    step_id = request.step.header.step_id
                    try:
                        compiled = await self._compiled(request.step)
                        answer = self._step(request.step, UNIFIED, caller, compiled, kept=True)
                        answers.put_nowait((step_id, answer))
                    except RequestRefused as error:
                        answers.put_nowait((step_id, error))
                    await slots.acquire()
            finally:
                answers.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (item := await answers.get()) is not None:
                step_id, answer = item
                response = pb.StreamUnifiedDecodeResponse(step_id=step_id)
                try:
                    if isinstance(answer, RequestRefused):
                        raise answer
                    self._encode(response, await answer)
                except RequestRefused as error:
                    response.error.CopyFrom(encode_error(error.refusal))
                await context.write(response)
                slots.release()
            await reader  # raises whatever ended it early
        finally:
            reader.cancel()
            while not answers.empty():  # their steps are done, but nobody reads the answers
                if (item := answers.get_nowait()) is not None and isinstance(item[1], asyncio.Future):
                    item[1].cancel()

    async def Forward(self, request: pb.ForwardRequest, context: Context) -> pb.ForwardResponse:
        """Compute whole inputs without a cache."""
        loaded = self._runtime.loaded
        if not loaded.info.can_forward:
            raise RequestRefused(Reason.UNSUPPORTED, "this executor does not offer Forward")
        if any(item.attention_mask for item in request.inputs):  # a mask of 64 MB takes a while to check
            call = await asyncio.to_thread(decode_forward, request, loaded.limits, loaded.info)
        else:
            call = decode_forward(request, loaded.limits, loaded.info)
        forwards = partial(loaded.engine.forward_once, call.inputs, call.want, call.views)
        outputs = await self._runtime.worker.submit_forwards(forwards)
        response = pb.ForwardResponse()
        for output in outputs:
            result = response.results.add()
            for name in ("hidden", "embedding", "logits"):
                if (array := getattr(output, name)) is not None:
                    getattr(result, name).CopyFrom(encode_tensor(array))
        return response

    async def CheckGrammar(
        self, request: pb.CheckGrammarRequest, context: Context
    ) -> pb.CheckGrammarResponse:
        """Compile a grammar, and keep it for a while."""
        loaded = self._runtime.loaded
        source = decode_grammar("grammar", request.grammar, loaded.limits)
        if isinstance(source, Refusal) or loaded.grammars is None:
            refusal = source if isinstance(source, Refusal) else unsupported("grammar")
            raise RequestRefused(refusal.reason, refusal.message)
        if isinstance(compiled := await loaded.grammars.get(source), str):
            raise RequestRefused(Reason.GRAMMAR, f"grammar.{source.kind}: {compiled}")
        return pb.CheckGrammarResponse(warnings=compiled.warnings)

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        """Load an adapter from the adapter directory, beside the steps."""
        self._check_admin(context, "LoadAdapter")
        loader = self._adapters()
        name, path = decode_load(request)
        return pb.LoadAdapterResponse(adapter=encode_adapter(name, await loader.load(name, path)))

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: Context
    ) -> pb.UnloadAdapterResponse:
        """Unload an adapter; sequences that use it go on."""
        self._check_admin(context, "UnloadAdapter")
        return pb.UnloadAdapterResponse(unloaded=await self._adapters().unload(request.name))

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: Context
    ) -> pb.ListAdaptersResponse:
        """List the loaded adapters, without waiting for the device."""
        return pb.ListAdaptersResponse(adapters=encode_adapters(self._adapters().store))

    async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        """Run the shapes that compile or allocate lazily."""
        self._check_admin(context, "Warmup")
        loaded, began = self._runtime.loaded, time.monotonic()
        await self._runtime.worker.submit_forwards(lambda: warm_up(self._runtime.backend, loaded.limits))
        return pb.WarmupResponse(elapsed_ms=int(1000 * (time.monotonic() - began)))

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Refuse new sequences, and wait until the present ones are released."""
        self._check_admin(context, "Drain")
        self._runtime.drain()
        remaining = context.time_remaining()
        timeout_s = math.inf if remaining is None else remaining - _DEADLINE_MARGIN_S
        if request.timeout_ms:
            timeout_s = min(timeout_s, request.timeout_ms / 1000)
        return pb.DrainResponse(sequences=await self._runtime.drained(timeout_s))

    def _adapters(self) -> AdapterLoader:
        """Raises RequestRefused where adapters are not offered."""
        loader = self._runtime.loaded.adapters
        if loader is None:
            raise RequestRefused(Reason.UNSUPPORTED, "this executor does not offer adapters")
        return loader

    def _caller(self, context: Context) -> str:
        """The name of the caller's identity: the call reaches the sessions of that identity only."""
        return self._credentials.identify(context).name

    def _check_admin(self, context: Context, method: str) -> None:
        """Raises RequestRefused unless the caller is an administrator."""
        caller = self._credentials.identify(context)
        if not caller.admin:
            raise RequestRefused(Reason.PERMISSION, f"{caller.name} is no administrator of this executor")
        self._audit.administered(caller.name, method)

    async def _computed(self, step: pb.Step, takes: Takes, context: Context) -> Answer:
        """The answer to the step of a unary token RPC."""
        caller = self._caller(context)
        return await self._step(step, takes, caller, await self._compiled(step))

    def _step(
        self, step: pb.Step, takes: Takes, caller: str, compiled: CompiledGrammars, *, kept: bool = False
    ) -> asyncio.Future[Answer]:
        """Queue the step of a token RPC. `kept`: it is done even if the client leaves."""
        traceparent = step.header.traceparent
        plan = decode_step(step, self._runtime.loaded.limits, takes, compiled)
        answer = self._runtime.worker.submit_step(plan, caller, kept=kept)
        if self._spans is not None and traceparent:
            answer.add_done_callback(partial(self._spans.step_done, traceparent))
        return answer

    async def _op(
        self, request: pb.TruncateKvRequest | pb.ReleaseCacheRequest | pb.ForkCacheRequest, context: Context
    ) -> Answer:
        caller, compiled = self._caller(context), NO_GRAMMARS
        if isinstance(request, pb.ForkCacheRequest):
            compiled = await self._compiled(request.fork)
        plan = decode_op(request, self._runtime.loaded.limits, compiled)
        return await self._runtime.worker.submit_step(plan, caller, kept=False)

    async def _compiled(self, request: pb.Step | pb.Fork) -> CompiledGrammars:
        """The grammars of a step or a fork, compiled off the event loop; most have none."""
        loaded = self._runtime.loaded
        if loaded.grammars is None or not (sources := sources_of(request, loaded.limits)):
            return NO_GRAMMARS
        return {source: await loaded.grammars.get(source) for source in sources}

    def _encode(self, response: R, answer: Answer) -> R:
        """Fill in the `result` of a response."""
        plan, result = answer
        self._metrics.observe(result)
        encode_result(response.result, result, plan, self._runtime.epoch)
        return response

    def _encode_single(self, response: R, answer: Answer) -> R:
        """The same for an RPC of one row or op, whose refusal becomes the status of the RPC."""
        result = answer[1]
        # A step with a row may have ops as well; their refusals are in the reply.
        only = result.rows[0] if result.rows else result.ops[0]
        if only.refusal is not None:
            raise RequestRefused(only.refusal.reason, only.refusal.message)
        return self._encode(response, answer)
