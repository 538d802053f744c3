# ruff: noqa: N802  # RPC names are the proto's
"""An executor that misbehaves as a test wants it to: the real protocol, no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from paceline.executor.v1 import executor_pb2 as pb
from paceline.executor.v1.executor_pb2_grpc import (
    ExecutorServiceServicer,
    add_ExecutorServiceServicer_to_server,
)

LIMITS = pb.Limits(
    page_size=16,
    total_pages=10,
    max_sequences=4,
    max_rows=4,
    max_step_tokens=64,
    max_drafts=8,
    max_steps=6,
    max_adapter_slots=2,
)


class FakeExecutor(ExecutorServiceServicer):
    """Answers each row with one token; what goes wrong is set from outside."""

    def __init__(self) -> None:
        self.epoch = 1
        self.model = b"model"
        self.vocabulary = b"words"
        self.capabilities: list[pb.Capability.ValueType] = [pb.CAPABILITY_VERIFY, pb.CAPABILITY_MULTI_STEP]
        self.state = pb.EXECUTOR_STATE_SERVING
        self.heartbeats = asyncio.Event()  # cleared: GetStatus hangs
        self.heartbeats.set()
        self.steps = asyncio.Event()  # cleared: steps hang
        self.steps.set()
        self.step_age_s = 0.0
        self.reply: pb.StreamUnifiedDecodeResponse | None = None  # instead of a right answer
        self.opened: list[int] = []  # `replaces` of each OpenSession
        self.owners: list[str] = []  # `owner` of each
        self.tokenizers_sent = 0
        self.directory: dict[str, bytes] = {}  # fingerprints of the adapters in its directory, by path
        self.adapters: dict[str, bytes] = {}  # those of the loaded ones, by name
        self.loads: list[str] = []  # names that were asked for
        self.asked, self.loaded = asyncio.Event(), asyncio.Event()  # set by LoadAdapter
        self.loading = asyncio.Event()  # cleared: LoadAdapter hangs
        self.loading.set()
        self.refuses_admin = False
        self.sessions, self.greeted = (
            asyncio.Event(),
            asyncio.Event(),
        )  # OpenSession hangs if cleared; was called
        self.sessions.set()

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        return pb.GetInfoResponse(
            epoch=self.epoch,
            model=pb.ModelInfo(name="fake", vocab_size=10, context_length=64),
            limits=LIMITS,
            capabilities=self.capabilities,
            fingerprints=pb.Fingerprints(model=self.model, vocabulary=self.vocabulary, sampler="s"),
        )

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        self.tokenizers_sent += 1
        yield pb.GetTokenizerResponse()

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        if request.session_id:
            await self.heartbeats.wait()
        return pb.GetStatusResponse(epoch=self.epoch, state=self.state, step_age_s=self.step_age_s)

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Any) -> pb.OpenSessionResponse:
        self.greeted.set()
        await self.sessions.wait()
        self.opened.append(request.replaces)
        self.owners.append(request.owner)
        return pb.OpenSessionResponse(session_id=100 + len(self.opened), epoch=self.epoch)

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Any) -> pb.ListAdaptersResponse:
        found = sorted(self.adapters.items())
        return pb.ListAdaptersResponse(adapters=[pb.Adapter(name=n, fingerprint=f) for n, f in found])

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Any) -> pb.LoadAdapterResponse:
        self.loads.append(request.name)
        self.asked.set()
        await self.loading.wait()
        if self.refuses_admin:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "fake is no administrator")
        if request.path not in self.directory:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"path: no directory {request.path}")
        fingerprint = self.directory[request.path]
        if self.adapters.setdefault(request.name, fingerprint) != fingerprint:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"name: {request.name} is another one")
        self.loaded.set()
        return pb.LoadAdapterResponse(
            adapter=pb.Adapter(name=request.name, fingerprint=fingerprint, rank=4, bytes=100)
        )

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Any) -> pb.UnloadAdapterResponse:
        return pb.UnloadAdapterResponse(unloaded=self.adapters.pop(request.name, None) is not None)

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Any) -> pb.CloseSessionResponse:
        return pb.CloseSessionResponse()

    async def StreamUnifiedDecode(
        self, requests: AsyncIterator[pb.StreamUnifiedDecodeRequest], context: Any
    ) -> AsyncIterator[pb.StreamUnifiedDecodeResponse]:
        async for request in requests:
            await self.steps.wait()
            lengths = [length + 1 for length in request.step.rows.kv_lengths]
            rows = len(lengths)
            result = pb.RowResults(kv_lengths=lengths, token_counts=[1] * rows, tokens=[7] * rows)
            yield self.reply or pb.StreamUnifiedDecodeResponse(
                result=pb.StepResult(step_id=request.step.header.step_id, epoch=self.epoch, rows=result)
            )


@asynccontextmanager
async def serving(fake: FakeExecutor, port: int = 0) -> AsyncIterator[int]:
    """The fake behind a port."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add_ExecutorServiceServicer_to_server(fake, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)
