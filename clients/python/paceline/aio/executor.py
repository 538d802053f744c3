"""The asyncio client of an executor: one method per RPC, a stream of steps, and sessions.

Steps are protobuf messages here too, without Python types of their own: they are the hot path, and
their arrays are packed already.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Self, TypeVar

import grpc.aio

from paceline import errors
from paceline.aio.calls import Exchange, Replies, reply_of, shielded
from paceline.channel import PLAINTEXT, Link, Metadata, Security, open_aio_channel
from paceline.executor.v1 import executor_pb2 as pb
from paceline.executor.v1.executor_pb2_grpc import ExecutorServiceStub
from paceline.names import check_address
from paceline.pieces import Pieces
from paceline.session import Session, step_result

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


class ExecutorClient:
    """One executor. Use as an async context manager, or `close()` it.

    Every call takes `timeout_s` (None: no deadline) and raises `paceline.errors`.
    """

    def __init__(self, address: str, *, security: Security = PLAINTEXT) -> None:
        """Raises ValueError for a URL, and for a host without a port."""
        check_address(address)
        self.address = address
        self._metadata = security.metadata
        self._channel = open_aio_channel(address, Link.PRIVATE, security)
        self._stub = ExecutorServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        await self._channel.close()

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel, for other services on the same address (grpc.health.v1)."""
        return self._channel

    # Properties and state

    async def get_info(self, *, timeout_s: float | None = None) -> pb.GetInfoResponse:
        """The executor's model, limits, capabilities and fingerprints."""
        return await self._call(self._stub.GetInfo, pb.GetInfoRequest(), timeout_s)

    async def get_tokenizer(self, *, timeout_s: float | None = None) -> pb.GetTokenizerResponse:
        """The model's tokenizer.json, chat template, end-of-sequence ids and generation defaults."""
        request = pb.GetTokenizerRequest()
        call = Replies(self._stub.GetTokenizer(request, timeout=timeout_s, metadata=self._metadata))
        pieces = Pieces[pb.GetTokenizerResponse]()
        while (piece := await call.read()) is not None:
            pieces.add(piece)
        return pieces.joined()

    async def get_caches(
        self,
        session_id: int,
        cache_ids: Iterable[int] = (),
        *,
        epoch: int = 0,
        timeout_s: float | None = None,
    ) -> pb.GetCachesResponse:
        """KV lengths and pending tokens of these caches; without ids, of all caches of the session.

        The reply reflects all steps of the session that the executor received before.
        """
        request = pb.GetCachesRequest(session_id=session_id, epoch=epoch, cache_ids=cache_ids)
        return await self._call(self._stub.GetCaches, request, timeout_s)

    async def get_status(
        self, session_id: int = 0, epoch: int = 0, *, timeout_s: float | None = None
    ) -> pb.GetStatusResponse:
        """Live counters. Renews the lease of session `session_id`, unless it is 0."""
        request = pb.GetStatusRequest(session_id=session_id, epoch=epoch)
        return await self._call(self._stub.GetStatus, request, timeout_s)

    # Sessions

    async def open_session(
        self,
        *,
        replaces: int = 0,
        lease_ms: int = 0,
        label: str = "",
        owner: str = "",
        timeout_s: float | None = None,
    ) -> Session:
        """Open a session. First releases and fences session `replaces`, and the `owner`'s previous one.

        `lease_ms` 0 selects the executor's default. `label` is for logs.
        """
        request = pb.OpenSessionRequest(replaces=replaces, lease_ms=lease_ms, label=label, owner=owner)
        return Session.opened(await self._call(self._stub.OpenSession, request, timeout_s))

    async def close_session(self, session_id: int, *, timeout_s: float | None = None) -> int:
        """End a session; returns the number of caches that this released."""
        request = pb.CloseSessionRequest(session_id=session_id)
        return (await self._call(self._stub.CloseSession, request, timeout_s)).released

    @asynccontextmanager
    async def session(
        self, *, replaces: int = 0, lease_ms: int = 0, label: str = "", timeout_s: float | None = None
    ) -> AsyncIterator[Session]:
        """A context manager: opens a session, and closes it at the end of the block."""
        session = await self.open_session(
            replaces=replaces, lease_ms=lease_ms, label=label, timeout_s=timeout_s
        )
        try:
            yield session
        finally:
            with suppress(errors.PacelineError):  # unreachable or restarted: then the lease expires
                await shielded(self.close_session(session.id, timeout_s=timeout_s or 5.0))

    # Steps

    async def prefill(self, step: pb.Step, *, timeout_s: float | None = None) -> pb.StepResult:
        """A step of one opening or chunk. Raises the row's error."""
        return step_result(await self._call(self._stub.Prefill, pb.PrefillRequest(step=step), timeout_s))

    async def batch_prefill(self, step: pb.Step, *, timeout_s: float | None = None) -> pb.StepResult:
        """A step of openings and chunks. Errors of rows are in the result."""
        return step_result(
            await self._call(self._stub.BatchPrefill, pb.BatchPrefillRequest(step=step), timeout_s)
        )

    async def decode(self, step: pb.Step, *, timeout_s: float | None = None) -> pb.StepResult:
        """A step of one row without drafts. Raises the row's error."""
        return step_result(await self._call(self._stub.Decode, pb.DecodeRequest(step=step), timeout_s))

    async def batch_decode(self, step: pb.Step, *, timeout_s: float | None = None) -> pb.StepResult:
        """A step of rows without drafts; each row decodes as many tokens as its `steps` says."""
        return step_result(
            await self._call(self._stub.BatchDecode, pb.BatchDecodeRequest(step=step), timeout_s)
        )

    async def unified_decode(self, step: pb.Step, *, timeout_s: float | None = None) -> pb.StepResult:
        """A step of any mix of openings, chunks, decodes and rows with drafts."""
        request = pb.UnifiedDecodeRequest(step=step)
        return step_result(await self._call(self._stub.UnifiedDecode, request, timeout_s))

    async def forward_verify(self, step: pb.Step, *, timeout_s: float | None = None) -> pb.StepResult:
        """A step of rows with drafts, which are verified."""
        request = pb.ForwardVerifyRequest(step=step)
        return step_result(await self._call(self._stub.ForwardVerify, request, timeout_s))

    def stream(self, *, timeout_s: float | None = None) -> StepStream:
        """Open a StreamUnifiedDecode call (async context manager): `send` steps, `recv` results in order."""
        return StepStream(self._stub.StreamUnifiedDecode, timeout_s, self._metadata)

    # Ops

    async def truncate_kv(
        self, header: pb.StepHeader, cache_id: int, length: int, *, timeout_s: float | None = None
    ) -> pb.StepResult:
        """Cut a cache to `length` tokens. The cache's next row must carry its input tokens."""
        truncate = pb.Truncate(cache_id=cache_id, length=length)
        request = pb.TruncateKvRequest(header=header, truncate=truncate)
        return step_result(await self._call(self._stub.TruncateKv, request, timeout_s))

    async def release_cache(
        self, header: pb.StepHeader, cache_ids: Iterable[int], *, timeout_s: float | None = None
    ) -> pb.StepResult:
        """Release caches; unknown ids are no error."""
        request = pb.ReleaseCacheRequest(header=header, release=pb.Release(cache_ids=cache_ids))
        return step_result(await self._call(self._stub.ReleaseCache, request, timeout_s))

    async def fork_cache(
        self, header: pb.StepHeader, fork: pb.Fork, *, timeout_s: float | None = None
    ) -> pb.StepResult:
        """Open a cache as a copy of the first tokens of another."""
        request = pb.ForkCacheRequest(header=header, fork=fork)
        return step_result(await self._call(self._stub.ForkCache, request, timeout_s))

    # Other RPCs

    async def forward(
        self,
        inputs: Iterable[Sequence[int] | pb.ForwardInput],
        outputs: Iterable[pb.ForwardOutput.ValueType],
        *,
        first_token: int = 0,
        token_count: int = 0,
        timeout_s: float | None = None,
    ) -> list[pb.ForwardResult]:
        """Hidden states, embeddings or logits of token id sequences, without caches; one result per input.

        `first_token`, `token_count`: of the tokens whose hidden states and logits come back; 0: to the end.
        """
        wire = [
            item if isinstance(item, pb.ForwardInput) else pb.ForwardInput(tokens=item) for item in inputs
        ]
        request = pb.ForwardRequest(
            inputs=wire, outputs=outputs, first_token=first_token, token_count=token_count
        )
        results = (await self._call(self._stub.Forward, request, timeout_s)).results
        if len(results) != len(wire):
            raise errors.incomplete(f"the reply has {len(results)} results for {len(wire)} inputs")
        return list(results)

    async def check_grammar(self, grammar: pb.Grammar, *, timeout_s: float | None = None) -> list[str]:
        """Compile a grammar, which the executor keeps for a while; returns warnings: parts without effect.

        Raises InvalidRequest if it can't be compiled.
        """
        request = pb.CheckGrammarRequest(grammar=grammar)
        return list((await self._call(self._stub.CheckGrammar, request, timeout_s)).warnings)

    async def load_adapter(self, name: str, path: str = "", *, timeout_s: float | None = None) -> pb.Adapter:
        """Load the adapter in directory `path` (empty: `name`) below the executor's adapter directory."""
        request = pb.LoadAdapterRequest(name=name, path=path)
        return (await self._call(self._stub.LoadAdapter, request, timeout_s)).adapter

    async def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> bool:
        """Unload an adapter; returns whether it was loaded. Caches that use it go on."""
        request = pb.UnloadAdapterRequest(name=name)
        return (await self._call(self._stub.UnloadAdapter, request, timeout_s)).unloaded

    async def list_adapters(self, *, timeout_s: float | None = None) -> list[pb.Adapter]:
        """The loaded adapters, by name."""
        return list((await self._call(self._stub.ListAdapters, pb.ListAdaptersRequest(), timeout_s)).adapters)

    async def warmup(self, *, timeout_s: float | None = None) -> int:
        """Run each batch shape that is compiled on first use once; returns the time this took, in ms."""
        return (await self._call(self._stub.Warmup, pb.WarmupRequest(), timeout_s)).elapsed_ms

    async def drain(self, *, wait_s: float | None = None, timeout_s: float | None = None) -> int:
        """Refuse openings from now on, and wait until all caches are released.

        Waits at most `wait_s`; None: until `timeout_s`. Returns the number of caches that are left.
        """
        request = pb.DrainRequest(timeout_ms=0 if wait_s is None else max(1, round(wait_s * 1000)))
        return (await self._call(self._stub.Drain, request, timeout_s)).sequences

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Reply],
        request: _Request,
        timeout_s: float | None,
    ) -> _Reply:
        return await reply_of(method, request, timeout_s, self._metadata)


class StepStream:
    """A StreamUnifiedDecode call. Results come in the order of the steps; several may be in flight.

    `recv` raises `StepRefused` if one whole step was refused; the stream stays usable. Any other error
    means that the stream is lost; steps without a result can be replayed on a new stream.
    """

    def __init__(
        self,
        method: grpc.aio.StreamStreamMultiCallable[
            pb.StreamUnifiedDecodeRequest, pb.StreamUnifiedDecodeResponse
        ],
        timeout_s: float | None,
        metadata: Metadata,
    ) -> None:
        self._call = Exchange(method, timeout_s, metadata)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the stream. Steps in flight are computed nevertheless, and no cache is released."""
        self._call.cancel()

    async def send(self, step: pb.Step) -> None:
        """Send one step, without waiting for its result. Where the stream is lost, this or `recv` raises."""
        await self._call.send(pb.StreamUnifiedDecodeRequest(step=step))

    async def recv(self) -> pb.StepResult:
        """Wait for the next result. Not for concurrent use. Raises StepRefused, and `paceline.errors`."""
        reply = await self._call.read()
        if reply is None:
            raise errors.Unavailable("the executor ended the stream")
        if reply.HasField("error"):
            cause = errors.from_code(reply.error.code, reply.error.message)
            raise errors.StepRefused(cause.message, code=cause.code) from cause
        return step_result(reply)
