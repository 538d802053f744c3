"""A thin client of ExecutorService: rows in, `Reply`s out, and a `Sequence` that keeps count.

It speaks the wire and checks only the shape of what comes back; what the contract promises is
checked in the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from typing import Any

import grpc
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status
from paceline.channel import Metadata
from paceline.executor.v1 import executor_pb2 as pb
from paceline.executor.v1 import executor_pb2_grpc

from tests.conformance.kit.reply import Reply, RowReply, unpack

SAMPLE, TOP_K, FULL, NONE = (
    pb.OUTPUT_MODE_SAMPLE,
    pb.OUTPUT_MODE_TOP_K,
    pb.OUTPUT_MODE_FULL,
    pb.OUTPUT_MODE_NONE,
)
GREEDY = pb.Sampling()

MIN_DEADLINE_S = 60.0
"""Seconds of a call, where the executor is fast."""
_MAX_TRIES = 1000


@dataclass(frozen=True, slots=True)
class Row:
    """A row that continues a sequence, before it is packed."""

    cache_id: int
    kv_length: int
    tokens: Tokens[int] = ()
    drafts: Tokens[int] = ()
    limit: int = 0
    steps: int = 1
    output: pb.OutputMode.ValueType = SAMPLE
    top_k: int = 0
    is_bound: bool = False
    masks: bytes = b""


def pack(rows: Iterable[Row]) -> pb.Rows:
    """Rows as parallel arrays, every array written out."""
    packed, rows = pb.Rows(), tuple(rows)
    for row in rows:
        packed.cache_ids.append(row.cache_id)
        packed.kv_lengths.append(row.kv_length)
        packed.tokens.extend(row.tokens)
        packed.token_counts.append(len(row.tokens))
        packed.drafts.extend(row.drafts)
        packed.draft_counts.append(len(row.drafts))
        packed.limits.append(row.limit)
        packed.steps.append(row.steps)
        packed.outputs.append(row.output)
        packed.top_ks.append(row.top_k)
        packed.kv_length_bounds.append(row.is_bound)
    if any(row.masks for row in rows):
        packed.masks.extend(row.masks for row in rows)
    return packed


def release(*cache_ids: int) -> pb.Op:
    """An op that releases caches."""
    return pb.Op(release=pb.Release(cache_ids=cache_ids))


def truncate(cache_id: int, length: int) -> pb.Op:
    """An op that cuts a cache."""
    return pb.Op(truncate=pb.Truncate(cache_id=cache_id, length=length))


def fork(source_id: int, cache_id: int, length: int, sampling: pb.Sampling = GREEDY) -> pb.Op:
    """An op that copies a cache."""
    return pb.Op(fork=pb.Fork(source_id=source_id, cache_id=cache_id, length=length, sampling=sampling))


def reasons_of(error: grpc.RpcError) -> list[str]:
    """The ErrorInfo reasons of a failed RPC."""
    assert isinstance(error, grpc.Call)
    status = rpc_status.from_call(error)
    infos = [info for detail in status.details if detail.Unpack(info := ErrorInfo())] if status else []
    return [info.reason for info in infos]


class Executor:
    """One executor under test: its stub, and what GetInfo said."""

    def __init__(
        self, channel: grpc.Channel, metadata: Metadata = (), adapters: tuple[str, ...] = ()
    ) -> None:
        self.channel = channel
        self.adapters = adapters  # directories of adapters that it can load
        self.metadata = metadata
        self.deadline_s = MIN_DEADLINE_S  # of each call
        self.stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        self.info: pb.GetInfoResponse = self.call("GetInfo", pb.GetInfoRequest())
        self.limits = self.info.limits
        self.page: int = self.limits.page_size
        self.vocab: int = self.info.model.vocab_size
        self.open_sessions: dict[int, Session] = {}
        self.lost = False  # unreachable: nothing more can be found out
        self.at_rest: pb.GetStatusResponse | None = None  # between two tests, if the last one left nothing

    def call(self, rpc: str, request: Any, timeout: float | None = None) -> Any:
        """One unary RPC; again, where a grammar has not read all of an output yet.

        Each try has `timeout` seconds, or the deadline of all calls. Raises grpc.RpcError.
        """
        timeout = self.deadline_s if timeout is None else timeout
        for _ in range(_MAX_TRIES):
            try:
                return getattr(self.stub, rpc)(request, timeout=timeout, metadata=self.metadata)
            except grpc.RpcError as error:
                if "GRAMMAR_BEHIND" not in reasons_of(error):
                    raise
        raise AssertionError(f"{rpc}: the grammar has not read the output after {_MAX_TRIES} calls")

    def begin(self, rpc: str, request: Any) -> Any:
        """A unary RPC's future, within the deadline of all calls."""
        return getattr(self.stub, rpc).future(request, timeout=self.deadline_s, metadata=self.metadata)

    def can(self, capability: str) -> bool:
        """Whether GetInfo advertises CAPABILITY_<capability>."""
        return pb.Capability.Value(f"CAPABILITY_{capability}") in self.info.capabilities

    def step(self, step: pb.Step, rpc: str = "UnifiedDecode") -> Reply:
        """One step by any of the token RPCs."""
        request = getattr(pb, f"{rpc}Request")(step=step)
        return unpack(self.call(rpc, request).result, len(step.openings))

    def tokenizer(self) -> list[pb.GetTokenizerResponse]:
        """The pieces of GetTokenizer. Raises grpc.RpcError."""
        request = pb.GetTokenizerRequest()
        return list(self.stub.GetTokenizer(request, timeout=self.deadline_s, metadata=self.metadata))

    def caches(self, session_id: int, *cache_ids: int) -> dict[int, pb.Cache]:
        """GetCaches of these, or of all, by id."""
        request = pb.GetCachesRequest(session_id=session_id, cache_ids=cache_ids)
        return {cache.cache_id: cache for cache in self.call("GetCaches", request).caches}

    def status(self) -> pb.GetStatusResponse:
        """The live counters."""
        response: pb.GetStatusResponse = self.call("GetStatus", pb.GetStatusRequest())
        return response

    def open_session(self, replaces: int = 0, lease_ms: int = 0, owner: str = "") -> Session:
        """A new session."""
        request = pb.OpenSessionRequest(
            replaces=replaces, lease_ms=lease_ms, label="conformance", owner=owner
        )
        session = Session(self, self.call("OpenSession", request))
        self.open_sessions[session.id] = session
        return session

    def stream(self, steps: Iterator[pb.Step]) -> Iterator[pb.StreamUnifiedDecodeResponse]:
        """StreamUnifiedDecode over whatever `steps` yields."""
        requests = (pb.StreamUnifiedDecodeRequest(step=step) for step in steps)
        responses: Iterator[pb.StreamUnifiedDecodeResponse] = self.stub.StreamUnifiedDecode(
            requests, timeout=self.deadline_s, metadata=self.metadata
        )
        return responses


class Session:
    """One session and the cache ids used in it."""

    def __init__(self, executor: Executor, opened: pb.OpenSessionResponse) -> None:
        self.executor = executor
        self.opened = opened
        self.id: int = opened.session_id
        self._last_cache_id = 0

    def new_id(self) -> int:
        """A cache id never used before in this session."""
        self._last_cache_id += 1
        return self._last_cache_id

    def header(self, step_id: int = 0, epoch: int = 0) -> pb.StepHeader:
        """A header that names this session."""
        return pb.StepHeader(session_id=self.id, step_id=step_id, epoch=epoch)

    def plan(
        self,
        rows: Iterable[Row] = (),
        openings: Iterable[pb.Opening] = (),
        ops: Iterable[pb.Op] = (),
        step_id: int = 0,
        epoch: int = 0,
    ) -> pb.Step:
        """A step of this session, as a message."""
        return pb.Step(header=self.header(step_id, epoch), ops=ops, rows=pack(rows), openings=openings)

    def step(
        self,
        rows: Iterable[Row] = (),
        openings: Iterable[pb.Opening] = (),
        ops: Iterable[pb.Op] = (),
        rpc: str = "UnifiedDecode",
    ) -> Reply:
        """One step without replay protection."""
        return self.executor.step(self.plan(rows, openings, ops), rpc)

    def opening(self, tokens: Tokens[int], **fields: Any) -> pb.Opening:
        """An opening under a new cache id; `fields` as in the proto."""
        fields.setdefault("cache_id", self.new_id())
        return pb.Opening(tokens=tokens, **fields)

    def open(self, tokens: Tokens[int], **fields: Any) -> Sequence:
        """Open one sequence with Prefill."""
        opening = self.opening(tokens, **fields)
        return Sequence(self, opening).took_opening(self.step(openings=[opening], rpc="Prefill").rows[0])

    def open_all(self, openings: Tokens[pb.Opening]) -> list[Sequence]:
        """Open several sequences with one BatchPrefill; none may be refused."""
        reply = self.step(openings=openings, rpc="BatchPrefill")
        return [Sequence(self, o).took_opening(r) for o, r in zip(openings, reply.rows, strict=True)]

    def fork(self, source: Sequence, length: int, sampling: pb.Sampling = GREEDY) -> Sequence:
        """Copy the first `length` tokens of a sequence."""
        cache_id = self.new_id()
        op = fork(source.id, cache_id, length, sampling).fork
        self.executor.call("ForkCache", pb.ForkCacheRequest(header=self.header(), fork=op))
        copy = Sequence(self, pb.Opening(cache_id=cache_id, sampling=sampling))
        copy.cached, copy.prompt_length = source.cached[:length], source.prompt_length
        return copy

    def release(self, *sequences: Sequence) -> int:
        """ReleaseCache; says how many existed."""
        op = pb.Release(cache_ids=[sequence.id for sequence in sequences])
        response = self.executor.call(
            "ReleaseCache", pb.ReleaseCacheRequest(header=self.header(), release=op)
        )
        released: int = response.result.ops[0].released
        return released

    def close(self) -> int:
        """CloseSession; says how many caches were released."""
        self.executor.open_sessions.pop(self.id, None)
        released: int = self.executor.call(
            "CloseSession", pb.CloseSessionRequest(session_id=self.id)
        ).released
        return released


class Sequence:
    """What a client knows of one cache: cached tokens, pending ones, and everything emitted."""

    def __init__(self, session: Session, opening: pb.Opening) -> None:
        self.session = session
        self.id: int = opening.cache_id
        self.sampling = opening.sampling
        self.prompt_length: int = opening.prompt_length or len(opening.tokens)
        self.cached: list[int] = []
        self.pending: list[int] = list(opening.tokens)
        self.emitted: list[int] = []
        self.hit = 0  # tokens that the prefix cache had
        self.last = RowReply(0, [])

    @property
    def n(self) -> int:
        """The KV length, as far as this client knows."""
        return len(self.cached)

    def row(self, **fields: Any) -> Row:
        """A row that continues this sequence from where it is."""
        return replace(Row(self.id, self.n), **fields)

    def took_opening(self, reply: RowReply) -> Sequence:
        """Note the answer to the opening."""
        assert reply.code is grpc.StatusCode.OK, f"opening refused: {reply.code.name} {reply.message}"
        self.hit = reply.cached_length
        self.took(Row(self.id, 0), reply)
        return self

    def took(self, row: Row, reply: RowReply) -> RowReply:
        """Note the answer to `row`: what was fed is cached up to the new KV length."""
        assert reply.code is grpc.StatusCode.OK, f"row refused: {reply.code.name} {reply.message}"
        known = [*self.cached, *(row.tokens or self.pending), *(reply.tokens or row.drafts)]
        assert self.n <= reply.kv_length <= len(known), (
            f"KV length {reply.kv_length} of {len(known)} known tokens"
        )
        self.cached, self.pending = known[: reply.kv_length], known[reply.kv_length :]
        self.emitted.extend(reply.tokens)
        self.last = reply
        return reply

    def feed(self, rpc: str = "Decode", **fields: Any) -> RowReply:
        """One row alone in a step; noted and returned."""
        row = self.row(**fields)
        return self.took(row, self.session.step([row], rpc=rpc).rows[0])

    def decode(self, count: int) -> list[int]:
        """`count` plain decode steps; the tokens they emitted."""
        return [self.feed().tokens[0] for _ in range(count)]

    def verify(self, drafts: Tokens[int], **fields: Any) -> RowReply:
        """One ForwardVerify row."""
        return self.feed("ForwardVerify", drafts=drafts, **fields)

    def truncate(self, length: int) -> pb.StepResult:
        """TruncateKv."""
        request = pb.TruncateKvRequest(
            header=self.session.header(), truncate=pb.Truncate(cache_id=self.id, length=length)
        )
        result: pb.StepResult = self.session.executor.call("TruncateKv", request).result
        self.cached, self.pending = self.cached[:length], []
        return result


def decode_together(sequences: Tokens[Sequence], count: int) -> None:
    """`count` steps of one BatchDecode over all sequences."""
    for _ in range(count):
        rows = [sequence.row() for sequence in sequences]
        reply = sequences[0].session.step(rows, rpc="BatchDecode")
        for sequence, row, answer in zip(sequences, rows, reply.rows, strict=True):
            sequence.took(row, answer)
